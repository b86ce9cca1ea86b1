"""The first hour of a new user: a run over epochs, with a validation file, stopped and extended.

And the sentence of README that llmtrain sends nothing.
"""

import math
import shlex
import signal
from pathlib import Path

from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, interrupt, long_form, metrics, read_json, run, series

FLAGS = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --block_size 32 --tokenizer byte "
    "--global_batch_size 8 --per_device_train_batch_size 8 "
    "--logging_steps 1 --eval_steps 0.25 --report_to none"
)
ROWS_PER_STEP = 8


def write_texts(folder: Path) -> list[str]:
    """Write a text of about 150 steps and a validation file, and return their flags."""
    text = "".join(f"{number} times {number} is {number**2}.\n" for number in range(2500))
    (folder / "train.txt").write_text(text[:40_000])
    (folder / "validation.txt").write_text(text[40_000:43_000])
    return shlex.split(f"--dataset {folder}/train.txt --eval_dataset {folder}/validation.txt")


@long_form
def test_a_run_of_epochs_is_stopped_finished_and_extended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*PYTHON, GPT, *FLAGS, *write_texts(tmp_path), "--output_dir", str(folder)]
    two_epochs = [*command, "--num_train_epochs", "2"]

    stopped = interrupt(two_epochs, folder, signal.SIGINT)
    assert stopped.status == 130
    run_forked(two_epochs).assert_ok()
    assert len(read_json(folder / "run.json")["starts"]) == 2

    # An epoch has a step for each batch of its rows.
    rows = read_json(folder / "run.json")["train_rows"]
    steps = 2 * math.ceil(rows / ROWS_PER_STEP)
    losses = series(folder, "train/loss")
    assert max(losses) == steps
    assert metrics(folder)[-1]["epoch"] == 2
    quarter = math.ceil(steps / 4)
    assert [*series(folder, "eval/loss")] == [*range(0, steps, quarter), steps]

    more = ["--num_train_epochs", "3", "--resume_from_checkpoint", str(folder)]
    run_forked([*command, *more]).assert_ok()
    extended_losses = series(tmp_path / "run-2", "train/loss")
    assert {step: extended_losses[step] for step in losses} == losses
    assert max(extended_losses) == 3 * max(losses) // 2


# Runs a recipe, and ends it if it looks up another host or connects to one.
WITHOUT_OTHER_HOSTS = """
import os, runpy, socket, sys

own_names = (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname())

def end_if_other_host(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in own_names:
        print("looked up", arguments[0], file=sys.stderr, flush=True)
        os._exit(3)
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        if arguments[1][0] not in own_names:
            print("connected to", arguments[1], file=sys.stderr, flush=True)
            os._exit(3)

sys.addaudithook(end_if_other_host)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@long_form
def test_a_run_without_a_login_looks_up_no_other_host(text_file: Path, tmp_path: Path) -> None:
    flags = ["--dataset", str(text_file), "--output_dir", str(tmp_path / "run")]
    command = [*PYTHON, "-c", WITHOUT_OTHER_HOSTS, GPT, *TINY, *flags, "--report_to", "auto"]
    online = {"HF_HUB_OFFLINE": "", "HF_HUB_DISABLE_TELEMETRY": ""}

    run(command, online).assert_ok()
    assert not (tmp_path / "run/wandb").exists()
    hub_name = run([*command, "--tokenizer", "gpt2"], online)

    assert hub_name.status == 3
    assert "looked up huggingface.co" in hub_name.err
