"""Start recipes as real processes. Each has its own process group, which ends with the test."""

import contextlib
import json
import os
import random
import shlex
import shutil
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
PYTHON = [str(BIN / "python")]

GPT = "recipes/gpt.py"
FINETUNE = "recipes/finetune.py"
PREFERENCE = "recipes/preference.py"
DISTILL = "recipes/distill.py"

LONG = bool(os.environ.get("LLMTRAIN_LONG"))  # `make test-all` sets it
long_form = pytest.mark.long

# Write what the documentation shows, instead of comparing it.
WRITE_DOCS = bool(os.environ.get("LLMTRAIN_WRITE_DOCS"))

# Flags are written as people type them, and split as a shell would split them. A path goes in with
# an f-string, since pytest's temporary folders have no spaces.

# Six steps that log each loss and evaluate once, for a model of any kind.
SIX_STEPS = shlex.split(
    "--global_batch_size 8 --per_device_train_batch_size 2 --warmup_steps 2 "
    "--max_steps 6 --logging_steps 1 --eval_steps 100 --threads 1 --report_to none"
)

# Flags of recipes/gpt.py.
TINY_GPT = shlex.split("--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --tokenizer byte")
TINY = [*TINY_GPT, *SIX_STEPS]

# Flags of recipes/finetune.py and recipes/preference.py, for any base model with these fields.
SMALL_SIZE = "hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8"
BYTE_DATA = shlex.split("--block_size 32 --tokenizer byte --eval_fraction 0.1")
SMALL_LLAMA = ["--config_overrides", SMALL_SIZE, *BYTE_DATA, *SIX_STEPS]

# Deprecations are errors, in the tests and in the processes that they start. The exceptions are
# calls between libraries. A message is the beginning of the warning, without a comma or colon.
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


# --- commands


def torchrun(processes: int) -> list[str]:
    """Return the beginning of a command that starts a recipe under torchrun."""
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(processes)]


def accelerate(config: str, *flags: str) -> list[str]:
    """Return the beginning of a command that starts a recipe under `accelerate launch`.

    Args:
        config: the name of a file in accelerate_configs/, without its ending.
        flags: further flags of `accelerate launch`.
    """
    config_file = f"accelerate_configs/{config}.yaml"
    return [str(BIN / "accelerate"), "launch", "--config_file", config_file, *flags]


# --- processes


@dataclass
class Ended:
    """A process that has ended: its exit status and its output."""

    status: int
    out: str
    err: str

    def assert_ok(self) -> "Ended":
        assert self.status == 0, f"status {self.status}\n{self.out}\n{self.err}"
        return self


def start_process(
    command: list[str], env: dict[str, str] | None = None, tree: Path = ROOT
) -> subprocess.Popen:
    """Start a command in a process group of its own, with ``tree`` as its working directory."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": ",".join(WARNING_FILTERS),
        **(env or {}),
    }
    return subprocess.Popen(
        command,
        cwd=tree,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait(process: subprocess.Popen, timeout: float = 240) -> Ended:
    """Wait for a process to end, and then end the rest of its group."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        stop_group(process)
    return Ended(process.returncode, out.decode(), err.decode())  # decode() keeps every \r


def run(command: list[str], env: dict[str, str] | None = None, timeout: float = 240) -> Ended:
    """Start a command and wait for it to end."""
    return wait(start_process(command, env), timeout)


def stop_group(process: subprocess.Popen) -> None:
    """Kill a process, its children and its group. Each worker of torchrun leads its own session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Return the processes of a run by rank, given the process id of their launcher."""
    ranks = {}
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError, KeyError):  # it may be ending
            ranks[int(child.environ()["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


# --- run folders


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl. A run may still be writing the last one."""
    complete_lines = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete_lines.splitlines()]


def series(folder: Path, key: str) -> dict[int, float]:
    """Return the values of one key of metrics.jsonl by step."""
    return {line["step"]: line[key] for line in metrics(folder) if key in line}


def wait_for_log_entries(process: subprocess.Popen, folder: Path, count: int) -> None:
    """Wait until a run has written ``count`` lines to metrics.jsonl."""
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt(command: list[str], folder: Path, signal_number: int, log_entries: int = 25) -> Ended:
    """Start a run, and send it a signal when it has written some log entries.

    SIGKILL is sent to all its processes.
    """
    process = start_process(command)
    try:
        wait_for_log_entries(process, folder, log_entries)
        if signal_number == signal.SIGKILL:
            stop_group(process)
        else:
            process.send_signal(signal_number)
    finally:
        ended = wait(process)
    return ended


def make_look_killed(folder: Path, step: int) -> None:
    """Leave a finished run as one that was killed after the checkpoint of a step."""
    shutil.rmtree(folder / "model")
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name > f"step-{step:08d}":
            shutil.rmtree(checkpoint)
    status = read_json(folder / "status.json") | {"state": "running", "step": step}
    (folder / "status.json").write_text(json.dumps(status))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# --- data

NOUNS = ["model", "token", "batch", "gradient", "process"]
NOUNS += ["kernel", "weight", "bucket", "sampler", "epoch"]
VERBS = ["reads", "sends", "keeps", "sums", "hides", "splits", "joins", "drops"]


def write_text(path: Path, sentences: int = 600, seed: int = 0) -> Path:
    """Write sentences that share a pattern, so that a model can learn something."""
    draw = random.Random(seed)

    def sentence() -> str:
        statement = f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}"
        return f"{statement}, and {draw.randint(2, 99)} {draw.choice(NOUNS)}s wait.\n"

    path.write_text("".join(sentence() for _ in range(sentences)))
    return path


def write_chats(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Write conversations of one to three turns. Each answer is the question, reversed."""
    draw = random.Random(seed)
    conversations = []
    for _ in range(count):
        messages = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            word = _random_word(draw, 1, 4)
            messages.append({"role": "user", "content": word})
            messages.append({"role": "assistant", "content": word[::-1]})
        conversations.append({"messages": messages})

    _write_json_lines(path, conversations)
    return path


def write_pairs(path: Path, count: int = 60, seed: int = 0) -> Path:
    """Write preference pairs of varying length: the reversed word is better than the word itself."""
    draw = random.Random(seed)
    words = [_random_word(draw, 3, 9) + "e" for _ in range(count)]
    pairs = [
        {"prompt": word, "chosen": word[::-1], "rejected": word * draw.randint(1, 2)}
        for word in words
    ]

    _write_json_lines(path, pairs)
    return path


def _random_word(draw: random.Random, shortest: int, longest: int) -> str:
    return "".join(draw.choice("abcd") for _ in range(draw.randint(shortest, longest)))


def _write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- reports


def bound(failures: int, trials: int) -> str:
    """Return a count of failures. If there are none, add the 95 % bound, 3 / trials (rule of three)."""
    count = f"{failures} of {trials}"
    if failures or trials <= 3:
        return count
    return f"{count} (95 % bound {3 / trials:.2%})"
