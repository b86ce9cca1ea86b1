"""Starting recipes as real processes, in a process group of their own that never outlives the test."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GPT, FINETUNE, PREFERENCE = "recipes/gpt.py", "recipes/finetune.py", "recipes/preference.py"
LONG = bool(os.environ.get("LLMTRAIN_LONG"))  # `make test-all` sets it
long_form = pytest.mark.long
TINY = [
    *(
        "--n_layer",
        "2",
        "--n_head",
        "2",
        "--n_embd",
        "32",
        "--block_size",
        "32",
        "--tokenizer",
        "byte",
    ),
    *("--global_batch_size", "8", "--per_device_train_batch_size", "2", "--warmup_steps", "2"),
    *("--max_steps", "6", "--logging_steps", "1", "--eval_steps", "100", "--report_to", "none"),
]

SMALL_LLAMA = [
    *("--config_overrides", "hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8"),
    *("--block_size", "32", "--tokenizer", "byte", "--eval_fraction", "0.1", *TINY[10:]),
]

PYTHON = [str(BIN / "python")]

# Deprecations are errors, in the tests and in the processes that they start. The exceptions are what
# libraries do among themselves. A message is the beginning of the text, without a comma or colon.
WARNING_FILTERS = [
    "error::DeprecationWarning",
    "error::FutureWarning",
    "error::PendingDeprecationWarning",
    # peft 0.21 asks a model of transformers 5.23.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # torch 2.13 compiles a torch.autograd.Function.
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    # torch 2.13 imports its mkldnn modules when it first compiles.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # numpy 2.4 asks pyarrow again, in the old way, after pyarrow refused an array.
    "ignore:Exporting an unversioned DLPack capsule is deprecated:DeprecationWarning",
    # Python 3.12 warns of a fork beside threads, which tests/forked.py and torch's loader do.
    "ignore:This process:DeprecationWarning",
]


def torchrun(processes: int) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(processes)]


def accelerate(config: str, *flags: str) -> list[str]:
    return [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        f"accelerate_configs/{config}.yaml",
        *flags,
    ]


@dataclass
class Ended:
    """A process that has ended: its status and what it printed."""

    status: int
    out: str
    err: str

    def assert_ok(self) -> "Ended":
        assert self.status == 0, f"status {self.status}\n{self.out}\n{self.err}"
        return self


def begin(
    command: list[str], env: dict[str, str] | None = None, tree: Path = ROOT
) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=tree,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": ",".join(WARNING_FILTERS),
            **(env or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait(process: subprocess.Popen, timeout: float = 240) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        stop_group(process)
    return Ended(process.returncode, out.decode(), err.decode())  # \r stays \r


def run(command: list[str], env: dict[str, str] | None = None, timeout: float = 240) -> Ended:
    return wait(begin(command, env), timeout)


def stop_group(process: subprocess.Popen) -> None:
    """Kill whatever is left of a process's children and group; torchrun's workers lead sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def metrics(folder: Path) -> list[dict[str, Any]]:
    whole = (
        (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    )  # the last line may be half written
    return [json.loads(line) for line in whole.splitlines()]


def series(folder: Path, key: str) -> dict[int, float]:
    """step -> value of one key of metrics.jsonl."""
    return {line["step"]: line[key] for line in metrics(folder) if key in line}


def wait_for_readings(process: subprocess.Popen, folder: Path, count: int) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_text(path: Path, sentences: int = 600, seed: int = 0) -> Path:
    draw = random.Random(seed)
    nouns = [
        "model",
        "token",
        "batch",
        "gradient",
        "process",
        "kernel",
        "weight",
        "bucket",
        "sampler",
        "epoch",
    ]
    verbs = ["reads", "sends", "keeps", "sums", "hides", "splits", "joins", "drops"]
    lines = [
        f"The {draw.choice(nouns)} {draw.choice(verbs)} the {draw.choice(nouns)}, and {draw.randint(2, 99)} "
        f"{draw.choice(nouns)}s wait.\n"
        for _ in range(sentences)
    ]
    path.write_text("".join(lines))
    return path


def write_chats(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Conversations of one to three turns, with a rule to learn in them."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            word = "".join(draw.choice("abcd") for _ in range(draw.randint(1, 4)))
            messages += [
                {"role": "user", "content": word},
                {"role": "assistant", "content": word[::-1]},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_pairs(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Write ragged pairs with a rule to learn in them: a word is turned round, not said again."""
    draw = random.Random(seed)
    words = [
        "".join(draw.choice("abcd") for _ in range(draw.randint(3, 9))) + "e" for _ in range(count)
    ]
    pairs = [
        {"prompt": word, "chosen": word[::-1], "rejected": word * draw.randint(1, 2)}
        for word in words
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def bound(failures: int, of: int) -> str:
    """A count of failures with its 95 % bound: with none in n, three in n (the rule of three)."""
    return f"{failures} of {of}" + (
        f" (95 % bound {3 / of:.2%})" if not failures and of > 3 else ""
    )
