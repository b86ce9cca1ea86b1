"""A mistake of the user is one line that tells what to do, and leaves nothing behind."""

import os
import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import BIN, GPT, PYTHON, TINY, accelerate, run, torchrun, write_text

# An old locale, which Python then neither replaces by UTF-8 nor ignores.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def assert_one_error(err: str, message: str) -> None:
    """Assert that a process printed an error of one line, and else only that it reads the data."""
    # A progress bar leaves a line that ends with a carriage return.
    visible_lines = [line.rpartition("\r")[2] for line in err.split("\n")]
    lines = [line for line in visible_lines if line.strip() and not line.startswith("data ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0])


def error_lines(err: str) -> list[str]:
    """Return the lines with errors, without those that a launcher adds."""
    return [line for line in err.splitlines() if line.startswith("error: ")]


# --- one process


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            "--n_layers 3", r"unknown flag --n_layers - did you mean --n_layer\?", id="unknown flag"
        ),
        pytest.param("--dataset {folder}/bad.jsonl", "bad.jsonl, line 2", id="bad record"),
        pytest.param("--resume_from_checkpoint {folder}", "{folder}", id="no checkpoint"),
        pytest.param("--per_device_train_batch_size 3", "use 2", id="batch size"),
    ],
)
def test_a_mistake_ends_python_with_status_2_and_makes_no_folder(
    flags: str, message: str, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    runs = tmp_path / "runs"
    good_flags = shlex.split(f"--dataset {text_file} --output_dir {runs}/run")
    bad_flags = shlex.split(flags.format(folder=tmp_path))

    ended = run_forked([*PYTHON, GPT, *TINY, *good_flags, *bad_flags])

    assert ended.status == 2
    assert_one_error(ended.err, message.format(folder=tmp_path))
    assert not runs.exists()


@pytest.mark.parametrize(
    ("data", "runs", "variables"),
    [
        pytest.param(b"d.txt", b"runs\xff", {}, id="output_dir"),
        pytest.param("\xe9.txt".encode(), b"runs", ASCII, id="locale"),
    ],
)
def test_a_name_that_is_not_utf_8_is_refused_before_a_step(
    data: bytes, runs: bytes, variables: dict[str, str], tmp_path: Path
) -> None:
    dataset = tmp_path / os.fsdecode(data)
    write_text(dataset)
    flags = ["--dataset", str(dataset), "--output_dir", str(tmp_path / os.fsdecode(runs))]

    ended = run([*PYTHON, GPT, *TINY, *flags], env=variables)

    assert ended.status == 2
    assert_one_error(ended.err, "UTF-8")
    assert [*tmp_path.iterdir()] == [dataset]


def test_a_port_that_is_in_use_is_named(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ended = run_forked([*PYTHON, GPT, *TINY, *flags], variables)

    assert ended.status == 2
    assert_one_error(ended.err, f"port {port} is in use")
    assert not folder.exists()


# --- several processes


@pytest.mark.parametrize(
    "bad_flag",
    [
        pytest.param("--n_head 3", id="before the process group exists"),
        pytest.param("--global_batch_size 7", id="after the process group exists"),
    ],
)
def test_a_mistake_on_all_ranks_is_printed_once(
    bad_flag: str, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder} {bad_flag}")

    ended = run_forked([*accelerate("cpu_ddp"), GPT, *TINY, *flags])

    assert ended.status == 2
    [line] = error_lines(ended.err)
    assert bad_flag in line
    assert not folder.exists()


ERROR_ON_RANK_1 = """
import os
import time
from llmtrain import launch
from llmtrain.errors import UserError

def main():
    if os.environ["RANK"] == "1":
        raise UserError("the disk of this machine is missing")
    time.sleep(60)

if __name__ == "__main__":
    launch(main)
"""


def test_an_error_of_one_rank_is_printed_with_its_number(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(ERROR_ON_RANK_1)

    ended = run([*torchrun(2), str(script)])

    assert ended.status != 0
    assert ended.err.count("error: rank 1: the disk of this machine is missing") == 1


RANK_1_DIFFERS = """
import os
import sys

sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch

flags = {flags}
if os.environ["RANK"] == "1":
    flags += ["--dataset", "{other}"]
if __name__ == "__main__":
    launch(lambda: gpt.main(flags))
"""


def test_a_difference_between_ranks_ends_the_run_before_anything_is_written(
    text_file: Path, tmp_path: Path
) -> None:
    """Two machines that share no disk may have different files."""
    other = write_text(tmp_path / "other.txt", seed=1)
    folder = tmp_path / "run"
    flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]
    script = tmp_path / "recipe.py"
    script.write_text(RANK_1_DIFFERS.format(flags=flags, other=other))

    ended = run_forked([*accelerate("cpu_ddp"), str(script)])

    assert ended.status == 2
    assert ended.err.count("error: rank 1 differs from rank 0 in data: ") == 1
    assert not folder.exists()


def test_fewer_processes_than_requested_are_an_error_with_the_right_command(
    text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    launcher = [str(BIN / "accelerate"), *shlex.split("launch --cpu --num_processes 2")]
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}")

    ended = run([*launcher, GPT, *TINY, *flags])

    assert ended.status != 0
    [line] = error_lines(ended.err)
    assert f"accelerate launch --multi_gpu --num_processes 2 {GPT}" in line
    assert not folder.exists()
