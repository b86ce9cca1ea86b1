"""Rounds of distillation, in which the student is trained on its own answers.

In a round, the student answers N prompts of the data, and the teacher scores the answers. The
answers become a set in the run folder, and training makes one pass over it. A round begins at a
checkpoint. If a start is killed in a round, the next one keeps the answers that are there, and
makes the others with the same weights.

Prompts are answered in groups, which are the same on any number of processes. An answer depends on
the weights, on its group and on the number of its prompt alone.
"""

import copy
import functools
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard

from llmtrain.config.flags import value_of
from llmtrain.console import say
from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.order import Mixture
from llmtrain.data.packing import LENGTHS
from llmtrain.data.prepare import SetMaker
from llmtrain.data.request import DataRequest
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.data.sources import records_source
from llmtrain.data.tokenized import MANIFEST, Tokenized
from llmtrain.errors import UserError, first_line
from llmtrain.files import JsonObject, new_folder, read_sealed, sync, write_sealed
from llmtrain.interfaces.batches import IGNORED
from llmtrain.models.generation import Sampling
from llmtrain.parallel.shards import reshard
from llmtrain.record.checkpoint import path_of
from llmtrain.training.answering import answer, scoring_batch, target_log_probabilities
from llmtrain.training.compiling import eager_code
from llmtrain.training.loop import Loop
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run_state import save, wait_for_saves

# The number of prompts that are answered together. It is a constant, because the sizes of matrix
# products affect rounding, and answers must not depend on the parallel layout.
GROUP = 8
_SCORES = ("student_logp", "teacher_logp")  # columns of a set


class Rounds:
    """The batches of a run with ``--rounds``.

    Args:
        loop: the loop of the run, whose checkpoint is restored.
        optimizer_state: the optimizer's state, for the checkpoint before a round.
    """

    def __init__(self, loop: Loop, optimizer_state: OptimizerState) -> None:
        self.loop = loop
        self.run = loop.run
        self.engine = loop.engine
        self.optimizer_state = optimizer_state
        settings = self.run.settings
        self.seed = settings.optim.seed
        self.prompts: int = value_of(settings, "prompts_per_round", default=0)
        self.steps = -(-self.prompts // settings.data.global_batch_size)  # of a round
        longest: int = value_of(settings, "max_new_tokens", default=0)
        self.sampling = Sampling(max_new_tokens=longest, temperature=1, top_k=0, seed=self.seed)

        rows = self.run.rows
        assert rows.tokenizer is not None, "the rows of conversations have one"
        self.tokenizer = rows.tokenizer
        self.stop_token_ids = {self.tokenizer.eos_token_id, *rows.stop_token_ids}
        # All prompts of a run are one sequence. Each epoch has all training rows, in another order.
        self.prompt_order = rows.mixture or Mixture([len(rows.train)], weights=[1.0])

    def loaders(self) -> Iterator[DataLoaderShard]:
        """Yield the prepared loader of each round, from that of the run's step on.

        If the run is asked to stop while a round is made, the iterator ends.
        """
        run = self.run
        while run.step < self.loop.max_steps:
            number = run.step // self.steps
            folder = run.folder / "rounds" / f"round-{number + 1:04}"
            read = functools.partial(self._read, folder, first_step=number * self.steps)
            # Rank 0 sends the rows to the others, which may not see the run folder.
            arrays = run.ranks.on_main(read)
            if arrays is None:
                start = time.monotonic()
                with self.loop.throughput.paused():
                    is_complete = self._make(number, folder)
                if not is_complete:
                    return
                arrays = run.ranks.on_main(read)
                self._log(number, arrays, time.monotonic() - start)

            loader = train_loader(
                TokenRows([ArrayRows(arrays)]),
                global_batch_size=run.settings.data.global_batch_size,
                micro_batch=run.layout.micro_batch,
                # A round is an epoch for the order of its rows.
                steps=range(run.step, min((number + 1) * self.steps, self.loop.max_steps)),
                seed=self.seed,
                prepare=run.bundle.prepare_batch,
                pinned=run.accelerator.device.type == "cuda",
            )
            yield run.accelerator.prepare_data_loader(loader)
            arrays.clear()  # Accelerate keeps all loaders that it has prepared

    def _read(self, folder: Path, first_step: int) -> Any:
        """Return the rows of a round by column; ``None`` if they are still to be made.

        Raises:
            UserError: if the set of the round is damaged, or absent in the middle of the round.
        """
        if not (folder / MANIFEST).exists():
            if self.run.step == first_step:
                return None
            # A run that begins in the middle of a round of another one.
            checkpoint = self.run.resume_point.checkpoint
            assert checkpoint is not None, "a run without a checkpoint is at step 0"
            origin = checkpoint.parent.parent / "rounds" / folder.name
            if origin != folder and origin.is_dir():
                with new_folder(folder) as working:
                    shutil.copytree(origin, working, dirs_exist_ok=True)
        try:
            rows = Tokenized.open(folder, check=True).train
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(
                f"the answers in {folder} cannot be used: {reason}; put the folder back "
                f"as it was, or delete it and resume from the checkpoint of step {first_step}."
            ) from None
        for leftover in folder.glob("group-*"):
            leftover.unlink()
        return rows.read(np.arange(len(rows)))

    def _make(self, number: int, folder: Path) -> bool:
        """Make the set of a round, and return whether it is complete.

        It is not if the run is asked to stop meanwhile.
        """
        run = self.run
        ranks = run.ranks
        self._save()
        say("round", f"{number + 1}: the student answers {self.prompts:,} prompts")
        last = (number + 1) * self.prompts
        starts = range(number * self.prompts, last, GROUP)
        groups = [range(start, min(start + GROUP, last)) for start in starts]
        paths = [folder / f"group-{index:05}.json" for index in range(len(groups))]
        missing = ranks.on_main(
            lambda: [index for index, path in enumerate(paths) if not read_sealed(path)]
        )
        stop_reason = ""
        self.engine.unwrapped.eval()
        with eager_code(self.engine.model):
            for turn in range(0, len(missing), ranks.world_size):
                indices = missing[turn : turn + ranks.world_size]
                stop_reason = self._make_groups({paths[i]: groups[i] for i in indices})
                if stop_reason:
                    break
        reshard(self.engine.unwrapped)
        self.engine.model.train()
        if stop_reason:
            run.status.stop_reason = stop_reason
            return False
        ranks.on_main(lambda: self._write_set(folder, paths))
        return True

    def _save(self) -> None:
        """Save a checkpoint, unless there is one of this step. The start of a run needs none."""
        run = self.run
        self.loop.settle()
        wait_for_saves(run)
        path = path_of(run.folder / "checkpoints", run.step)
        if run.step and not run.ranks.on_main(path.exists):
            self.engine.phases.begin("a save")
            save(run, self.engine, self.optimizer_state)

    def _make_groups(self, numbers_by_path: Mapping[Path, range]) -> str:
        """Let each rank answer and score a group, and write the groups.

        Ranks make the same passes, so a rank without a group of its own repeats the last one.

        Returns:
            Why the run is asked to stop; empty if it is not.
        """
        run = self.run
        start = time.monotonic()
        groups = [*numbers_by_path.values()]
        group = self._group(groups[min(run.ranks.rank, len(groups) - 1)])
        run.deadline.reserve("round", time.monotonic() - start)
        stop_reason = run.status.stop_reason if run.wants_to_stop() else ""
        results = run.ranks.on_all(lambda: (group, stop_reason))

        def write() -> None:
            for path, (content, _) in zip(numbers_by_path, results, strict=False):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(path, content)

        run.ranks.on_main(write)
        return next((reason for _, reason in results if reason), "")

    def _group(self, numbers: range) -> JsonObject:
        """Answer a group of prompts, and score the answers.

        Returns:
            ``records`` of tokens, with columns of scores: the log-probability of each token of an
            answer under the student and under the teacher.
        """
        rows = self.run.rows
        prompts = self._prompts(numbers)
        answers = answer(
            self.engine,
            prompts,
            numbers,
            self.sampling,
            self.stop_token_ids,
            width=rows.positions + 1,
            vocabulary=rows.vocabulary,
        )
        batch = scoring_batch(prompts, answers, self.engine.device)
        self.engine.phases.begin("a round")
        with torch.no_grad():
            of_student = self.engine.unwrapped(**batch, compute=target_log_probabilities)
        of_teacher = self.engine.frozen("teacher", target_log_probabilities, batch)
        lengths = [len(ids) for ids in answers]
        scores = torch.split(torch.stack([of_student, of_teacher], dim=1).cpu(), lengths)

        records = []
        for prompt, ids, values in zip(prompts, answers, scores, strict=True):
            record = {"input_ids": [*prompt, *ids], "labels": [IGNORED] * len(prompt) + ids}
            for name, column in zip(_SCORES, values.T.tolist(), strict=True):
                record[name] = [0.0] * len(prompt) + column
            records.append(record)
        return {"records": records}

    def _prompts(self, numbers: range) -> list[list[int]]:
        """Return the tokens of some prompts: those of a row before its last answer."""
        order = self.prompt_order.rows_at(np.array(numbers), self.seed)
        columns = self.run.rows.train.read(order)
        prompts = []
        for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
            last = np.flatnonzero(labels != IGNORED)[-1]
            start = np.flatnonzero(labels[:last] == IGNORED)[-1] + 1
            prompts.append(ids[:start].tolist())
        return prompts

    def _write_set(self, folder: Path, paths: list[Path]) -> None:
        """Write the set of a round, given the files of its groups."""
        rows = self.run.rows
        records = [record for path in paths for record in read_sealed(path)["records"]]
        config = DataConfig(dataset=[], eval_fraction=0, extra_columns=[*_SCORES])
        config.tokenizer = rows.metadata.tokenizer
        request = DataRequest(
            config,
            rows.positions,
            chat=ChatConfig(packing=False),
            support=None,
            trust_remote_code=False,
            own_source=records_source(records),
            unpaired=False,
            max_positions=None,
            tokenizer=copy.copy(self.tokenizer),
        )
        maker = SetMaker(folder, request)
        maker.make()
        maker.finish()
        sync(folder / MANIFEST)
        sync(folder)

    def _log(self, number: int, arrays: Mapping[str, np.ndarray], seconds: float) -> None:
        """Log what the answers of a round are like."""
        last_ids = np.take_along_axis(arrays["input_ids"], arrays[LENGTHS] - 1, axis=1)
        is_target = arrays["labels"] != IGNORED
        gaps = (arrays["student_logp"] - arrays["teacher_logp"])[is_target]
        metrics = {
            "round/answers": len(is_target),
            "round/tokens": float(is_target.sum(axis=1).mean()),
            "round/stopped": float(np.isin(last_ids, [*self.stop_token_ids]).mean()),
            "round/reverse_kl": float(gaps.mean(dtype=np.float64)),
            "round/seconds": round(seconds, 3),
        }
        self.loop.log(metrics)
        say(
            "round",
            f"{number + 1}: answers of {metrics['round/tokens']:.1f} tokens, "
            f"{metrics['round/stopped']:.0%} with an end; reverse KL "
            f"{metrics['round/reverse_kl']:.4f}, {seconds:.1f} s",
        )
