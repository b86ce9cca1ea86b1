"""nanoGPT, for the tables that compare with it: its train.py and its loop, and recipes/gpt.py beside."""

import contextlib
import pickle
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.comparison import Figures
from benchmarks.runs import (
    GPT_RECIPE,
    GPTShape,
    flags,
    half_precision,
    metrics,
    new_run_flags,
    newest_file,
    run,
    run_peer,
)

EVAL_FRACTION = 0.1  # the last part of a text, on which both sides evaluate

_NANOGPT_SETTINGS = [
    "device=cpu",
    "compile=False",
    "eval_iters=20",
    "log_interval=1",
    "dropout=0.0",
    "always_save_checkpoint=True",
    "dataset=text",
    "out_dir=out",
]


def write_nanogpt_data(
    folder: Path, train_ids: Sequence[int], eval_ids: Sequence[int], vocabulary: int
) -> None:
    """Write tokens as nanoGPT's train.py reads them, below the folder in which it runs."""
    data = folder / "data/text"
    data.mkdir(parents=True)
    np.asarray(train_ids, np.uint16).tofile(data / "train.bin")
    np.asarray(eval_ids, np.uint16).tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))


def run_nanogpt(folder: Path, nanogpt: Path, settings: list[str]) -> Figures:
    """Run nanoGPT's train.py in a folder that has its data.

    Args:
        folder: the folder, in which ``write_nanogpt_data`` has written.
        nanogpt: a checkout of nanoGPT.
        settings: settings of train.py, such as ``n_layer=4``.

    Returns:
        ``seconds`` from the command to its last checkpoint, and the eval ``loss`` of that.
    """
    # train.py looks for this file in the folder in which it is started.
    shutil.copy(nanogpt / "configurator.py", folder)
    command = [sys.executable, nanogpt / "train.py", nanogpt / "config/train_shakespeare_char.py"]
    command += [f"--{setting}" for setting in [*_NANOGPT_SETTINGS, *settings]]
    checkpoint = folder / "out/ckpt.pt"

    start = time.time()
    run(command, cwd=folder)
    seconds = checkpoint.stat().st_mtime - start

    loss = run_peer("loss", nanogpt, checkpoint, folder / "data/text/val.bin")
    return {"seconds": seconds, "loss": loss}


def run_recipe(folder: Path, recipe_flags: list[str]) -> Figures:
    """Run recipes/gpt.py, which evaluates on the same part of the text as nanoGPT.

    Returns:
        ``seconds`` from the command to its last evaluation, and the eval ``loss`` of that. Also
        parts of the seconds: ``start`` until the first log entry, ``first evaluation``, ``steps``,
        and ``last evaluation``.
    """
    start = time.time()
    run_gpt_recipe(folder, recipe_flags)
    seconds = newest_file(folder / "run", "metrics.jsonl").stat().st_mtime - start

    entries = metrics(folder / "run")
    evaluations = [entry for entry in entries if "eval/loss" in entry]
    return {
        "seconds": seconds,
        "loss": entries[-1]["eval/loss"],
        "start": entries[0]["time"] - start,
        "first evaluation": evaluations[0]["time"] - entries[0]["time"],
        "steps": entries[-2]["time"] - evaluations[0]["time"],
        "last evaluation": entries[-1]["time"] - entries[-2]["time"],
    }


def prepare_recipe_data(folder: Path, recipe_flags: list[str]) -> None:
    """Tokenise the text, so that later runs find the rows in the cache."""
    run_gpt_recipe(folder, [*recipe_flags, "--dry_run"])


def run_gpt_recipe(folder: Path, recipe_flags: list[str]) -> None:
    """Run recipes/gpt.py, in bf16 if the CPU has instructions for it."""
    run_flags = flags(
        eval_fraction=EVAL_FRACTION,
        eval_steps=100_000,
        save_steps=100_000,
        logging_steps=100,
        mixed_precision=half_precision(),
    )
    run(
        [
            sys.executable,
            GPT_RECIPE,
            *recipe_flags,
            *run_flags,
            *new_run_flags(folder / "run"),
        ],
        LLMTRAIN_CACHE=str(folder / "cache"),
    )


class NanoGPTLoop:
    """nanoGPT, step by step.

    Args:
        folder: a checkout of github.com/karpathy/nanoGPT.
        tokens: a file of uint16 tokens, one after the other.
        shape: the size of the model and of the batch.
        vocabulary: the number of tokens.
        device: ``cpu`` or ``cuda``.
        bias: whether linear layers and norms have biases, as GPT-2's have.
        dtype: of autocast, or ``None``. nanoGPT itself takes no autocast on a CPU.
        fused: whether AdamW is fused.
        backend: compiles the model; ``None`` leaves it eager.
    """

    def __init__(
        self,
        folder: str,
        tokens: Path,
        shape: GPTShape,
        vocabulary: int,
        device: str,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        fused: bool = True,
        backend: str | None = None,
    ) -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import model as nano

        self.tokens = tokens
        self.block = shape.block
        self.batch = shape.batch
        self.device = device
        if device == "cuda":  # as train.py does
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True

        config = nano.GPTConfig(
            block_size=shape.block,
            vocab_size=vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.width,
            dropout=0.0,
            bias=bias,
        )
        self.network = nano.GPT(config).to(device)
        decayed = [p for p in self.network.parameters() if p.dim() >= 2]
        plain = [p for p in self.network.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=fused)
        self.forward = self.network
        if backend is not None:
            self.forward = torch.compile(self.network, backend=backend)
        self.autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if dtype is not None:
            self.autocast = torch.autocast(device, dtype)
        self.inputs, self.targets = self.draw()

    @property
    def positions(self) -> int:
        """Positions of a step."""
        return self.batch * self.block

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a batch, from random positions of the file."""
        data = np.memmap(self.tokens, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - self.block, (self.batch,))
        rows = [data[start : start + self.block + 1].astype(np.int64) for start in starts]
        x = torch.stack([torch.from_numpy(row[:-1]) for row in rows])
        y = torch.stack([torch.from_numpy(row[1:]) for row in rows])
        if self.device != "cuda":
            return x, y
        return (
            x.pin_memory().to(self.device, non_blocking=True),
            y.pin_memory().to(self.device, non_blocking=True),
        )

    def step(self) -> torch.Tensor:
        """Make a step; return its loss."""
        with self.autocast:
            _, loss = self.forward(self.inputs, self.targets)
        self.inputs, self.targets = self.draw()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
