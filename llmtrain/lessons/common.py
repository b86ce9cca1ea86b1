"""A small model, rows, and ways to print, to check results and to run recipes, for all lessons."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import GradBucket
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain import GPT, GPTConfig, Objective, OptimConfig, ParallelConfig, make_optimizer
from llmtrain.errors import short_repr
from llmtrain.files import shipped_folder
from llmtrain.launching.children import recipe_command, start_command
from llmtrain.parallel.placement import engine_for
from llmtrain.parallel.ranks import ranks_of
from llmtrain.seeds import seed_of
from llmtrain.training.step import train_step

# The columns of a micro-batch.
Batch: TypeAlias = dict[str, torch.Tensor]
# The future of a bucket's mean over the ranks.
BucketFuture: TypeAlias = torch.futures.Future[torch.Tensor]
# Begins to average a bucket over the ranks.
BucketAverage: TypeAlias = Callable[[GradBucket], BucketFuture]

VOCABULARY = 64
BLOCK = 32
LEARNING_RATE = 3e-3

TINY_RUN = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 64,
    "eval_fraction": 0,
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "threads": 1,
    "report_to": "none",
}


# --- printing and checking


def show(text: str) -> None:
    """Print a line, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def show_measured(text: str) -> None:
    """Print a line that differs from machine to machine."""
    show(f"measured  {text}".rstrip())


def claim(text: str, holds: bool, expected: bool = True) -> None:
    """Print whether a claim holds.

    Raises:
        AssertionError: if ``holds`` differs from ``expected`` on any rank.
    """
    show(f"{text}: {holds}")
    assert holds == expected, text


class WrongAnswerError(AssertionError):
    """A result that a lesson refuses: the symptom, which has a hint, and what the hint names."""


def expect(holds: bool, symptom: str, **details: object) -> None:
    """Check a result.

    Args:
        holds: whether it is as expected.
        symptom: the name of a hint in exercises/hints.yaml, about a result that is not.
        details: what the hint names.

    Raises:
        WrongAnswerError: if it is not.
    """
    if not holds:
        raise WrongAnswerError(symptom, details)


def compare(result: Any, expected: torch.Tensor, **typical: Sequence[torch.Tensor]) -> None:
    """Check a tensor. Its values may differ from the expected ones by about 1e-5.

    Args:
        result: what is checked.
        expected: the right tensor.
        typical: the results of typical mistakes, by symptom.
    """
    expect(isinstance(result, torch.Tensor), "type", got=short_repr(result), expected="a tensor")
    expect(result.dtype == expected.dtype, "dtype", got=result.dtype, expected=expected.dtype)
    if _are_close(result, expected):
        return
    for symptom, wrong_results in typical.items():
        expect(not any(_are_close(result, wrong) for wrong in wrong_results), symptom)
    expect(result.shape == expected.shape, "shape", got=[*result.shape], expected=[*expected.shape])
    index = int((result - expected).abs().argmax())
    numbers = [float(tensor.flatten()[index]) for tensor in (result, expected)]
    expect(False, "values", index=index, got=numbers[0], expected=numbers[1])


def compare_shard(
    shard: Any, full: Any, rank: int, processes: int, **typical: list[torch.Tensor]
) -> None:
    """Check that a rank has its rows of a full tensor; see :func:`compare`."""
    shards = shards_of(full, processes)
    floor = len(full) // processes
    rounded_down = full[rank * floor : (rank + 1) * floor]
    compare(shard, shards[rank], **typical, floor=[rounded_down], other=shards, everything=[full])


def _are_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-5, atol=1e-5)


class Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the messages of this process while the context is open.

    Attributes:
        sent: the rank and the bytes of each message to one rank.
        collectives: the names of the operations that carry data among all ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[int, int]] = []
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, operation = func.name().partition("::")
        name = operation.strip("_")
        if name == "send":
            [tensor], _, receiver, _ = args
            self.sent.append((receiver, tensor.nbytes))
        elif "c10d" in library and not name.startswith(("recv", "barrier", "wait", "wrap")):
            self.collectives.append(name)
        return func(*args, **kwargs or {})


# --- model and data


def small_gpt(n_layer: int = 2, n_embd: int = 64) -> GPT:
    """Return a model with the same initial weights on every rank."""
    config = GPTConfig(n_layer=n_layer, n_head=4, n_embd=n_embd, block_size=BLOCK)
    return GPT(config, VOCABULARY, seed=0)


def rows(count: int, step: int = 0) -> torch.Tensor:
    """Return rows that a model can learn, as int64 [count, BLOCK + 1].

    In a row, each token is the token before it plus a constant.
    """
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(1, VOCABULARY, (count, 1), generator=generator)
    stride = torch.randint(1, VOCABULARY, (count, 1), generator=generator)
    return (first + stride % 7 * torch.arange(BLOCK + 1)) % VOCABULARY


def shards_of(full: torch.Tensor, processes: int) -> list[torch.Tensor]:
    """Return the rows of each rank, as FSDP2 deals them out: the last may have fewer, or none."""
    return [*full.chunk(processes), *[full[:0]] * processes][:processes]


def random_tensor(*shape: int, seed: int, rank: int = 0) -> torch.Tensor:
    """Return a tensor that depends on the seed and the rank only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(seed, rank)))


def rank_rows(accelerator: Accelerator, count: int, step: int = 0) -> torch.Tensor:
    """Return this rank's share of a global batch of ``count`` rows."""
    shares = rows(count, step).chunk(accelerator.num_processes)
    share: torch.Tensor = shares[accelerator.process_index]
    return share


def batch(tokens: torch.Tensor) -> Batch:
    """Return rows as a micro-batch."""
    return {"input_ids": tokens, "labels": tokens}


# --- training


class Training:
    """A model that all ranks train, each with its own rows.

    Args:
        accelerator: the Accelerator of the lesson.
        model: the model.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        optimizer = make_optimizer(
            accelerator, model, OptimConfig(optim="adamw", learning_rate=LEARNING_RATE)
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.engine = engine_for(
            ranks_of(accelerator),
            self.model,
            objective=Objective(),
            config=ParallelConfig(),
        )

    def accumulate(self, batches: Sequence[Batch]) -> None:
        """Leave the gradient of the mean loss over the rows of all ranks in ``.grad``.

        Args:
            batches: this rank's micro-batches.
        """
        self.engine.phases.begin("count")
        self.engine.forward_backward(batches, self.engine.count(batches))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Change the weights by one step of the package's loop.

        Args:
            tokens: this rank's rows.

        Returns:
            This rank's part of the mean loss. The parts of all ranks add up to it.
        """
        max_grad_norm = 1.0
        result = train_step(self.engine, self.optimizer, [batch(tokens)], max_grad_norm)
        return result.sums.loss / result.denominator

    def steps(self, count: int, load: Callable[[int], torch.Tensor]) -> Iterator[int]:
        """Make steps, and name their phases as the package's loop does.

        Args:
            count: how many steps to make.
            load: returns the rows of this rank, for the number of steps made before.

        Yields:
            The number of steps made, after each.
        """
        phases = self.engine.phases
        with phases.watching():
            for step in range(count):
                phases.begin("data")
                self.step(load(step))
                phases.begin("other", step + 1)
                yield step + 1


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Return a copy of the gradient of all parameters, as one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@contextlib.contextmanager
def training_run(
    folder: Path,
    steps: int,
    *flags: str,
    processes: int = 1,
    restarts: int = 0,
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run recipes/gpt.py, and wait for its end when the block ends.

    Args:
        folder: the folder of the run.
        steps: how many steps it makes.
        flags: further flags of the recipe.
        processes: how many processes there are; torchrun starts several.
        restarts: how often torchrun starts several processes again after a failure.

    Yields:
        The process of torchrun, or the only process. It leads its own session.

    Raises:
        AssertionError: if the run fails.
    """
    recipe = [f"{shipped_folder('recipes')}/gpt.py", *flags]
    run_flags = TINY_RUN | {"max_steps": steps, "output_dir": folder}
    command = recipe_command(recipe, run_flags, processes)
    if restarts:
        command.insert(command.index(recipe[0]), f"--max-restarts={restarts}")
    on_cpu = False
    with start_command(command, on_cpu, subprocess.PIPE) as process:
        yield process
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors.decode(errors="replace")[-2000:]
