"""What a person gets wrong is one line that says what to do, and leaves nothing behind."""

import re
import socket
from pathlib import Path

import pytest

from tests.launching import GPT, PYTHON, TINY, accelerate, long_form, run, torchrun, write_text


def assert_one_line(err: str, says: str) -> None:
    shown = [
        line.rpartition("\r")[2] for line in err.split("\n")
    ]  # what a bar that went away leaves
    lines = [line for line in shown if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert re.search(says, lines[0])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--n_layers", "3"], r"unknown flag --n_layers: use --n_layer\."),
        (["--dataset", "{tmp}/bad.jsonl"], r"bad.jsonl, line 2: not JSON"),
        (["--resume_from_checkpoint", "{tmp}"], r"neither a run folder nor a checkpoint"),
        (
            ["--per_device_train_batch_size", "3"],
            r"3 does not divide the 8 rows of each process .* use 1, 2 or 4\.",
        ),
    ],
)
def test_under_plain_python_it_ends_with_status_2(
    flags: list[str], says: str, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    flags = [flag.format(tmp=tmp_path) for flag in flags]
    out = tmp_path / "runs" / "run"
    ended = run(
        [*PYTHON, GPT, *TINY, "--dataset", str(text_file), "--output_dir", str(out), *flags]
    )
    assert ended.status == 2
    assert_one_line(ended.err, says)
    assert not out.parent.exists()


@pytest.mark.parametrize("flags", [["--n_head", "3"], ["--global_batch_size", "7"]])
def test_two_ranks_say_it_once(flags: list[str], text_file: Path, tmp_path: Path) -> None:
    """Before the process group exists, and after."""
    out = tmp_path / "run"
    ended = run(
        [
            *accelerate("cpu_ddp"),
            GPT,
            *TINY,
            "--dataset",
            str(text_file),
            "--output_dir",
            str(out),
            *flags,
        ]
    )
    assert ended.status != 0
    ours = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(ours) == 1, ended.err
    assert " ".join(flags) in ours[0]
    assert not out.exists()


def test_an_error_of_one_rank_alone_is_said_too(text_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import os\nfrom llmtrain import launch\nfrom llmtrain.errors import UserError\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1': raise UserError('the disk of this machine is missing')\n"
        "    import time; time.sleep(60)\n"
        "if __name__ == '__main__': launch(main)\n"
    )
    ended = run([*torchrun(2), str(script)])
    assert ended.status != 0
    assert ended.err.count("error: rank 1: the disk of this machine is missing") == 1


@pytest.mark.parametrize(
    ("on_rank_1", "says"),
    [
        ("argv += ['--dataset', OTHER]", "data: "),  # as two machines that share no disk could
        pytest.param(
            "run_description.versions = lambda: {'torch': '1.0'}", "versions: ", marks=long_form
        ),
        pytest.param(
            "argv += ['--per_device_train_batch_size', '4']",
            "flags: per_device_train_batch_size 4 there, 2 here",
            marks=long_form,
        ),
    ],
)
def test_ranks_that_are_apart_stop_before_anything_is_written(
    on_rank_1: str, says: str, text_file: Path, tmp_path: Path
) -> None:
    other = write_text(tmp_path / "other.txt", seed=1)
    out = tmp_path / "run"
    script = tmp_path / "apart.py"
    script.write_text(
        "import os, sys\nsys.path.insert(0, 'recipes')\nimport gpt\nfrom llmtrain import launch\n"
        "from llmtrain.record import run_description\n"
        f"OTHER = {str(other)!r}\n"
        f"argv = [*{TINY}, '--output_dir', {str(out)!r}, '--dataset', {str(text_file)!r}]\n"
        f"if os.environ['RANK'] == '1':\n    {on_rank_1}\n"
        "if __name__ == '__main__': launch(lambda: gpt.main(argv))\n"
    )
    ended = run([*accelerate("cpu_ddp"), str(script)])
    assert ended.status != 0
    assert ended.err.count(f"error: rank 1 differs from rank 0 in {says}") == 1
    assert not out.exists()


def test_fewer_processes_than_asked_for_stops_with_the_command_that_works(
    text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [
        *accelerate("x")[:2],
        "--cpu",
        "--num_processes",
        "2",
        GPT,
        *TINY,
        "--output_dir",
        str(out),
    ]
    ended = run([*command, "--dataset", str(text_file)])
    assert ended.status != 0
    assert "2 processes were requested, but accelerate started one" in ended.err
    assert f"accelerate launch --multi_gpu --num_processes 2 {GPT}" in ended.err
    assert not out.exists()


def test_a_port_that_is_taken_is_named(text_file: Path, tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = str(held.getsockname()[1])
        env = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ended = run(
            [
                *PYTHON,
                GPT,
                *TINY,
                "--dataset",
                str(text_file),
                "--output_dir",
                str(tmp_path / "run"),
            ],
            env,
        )
    assert ended.status == 2
    assert_one_line(ended.err, f"port {port} is in use; choose another")
    assert not (tmp_path / "run").exists()


def test_debug_shows_where_an_error_arose(tmp_path: Path) -> None:
    ended = run(
        [*PYTHON, GPT, "--n_layers", "3", "--output_dir", str(tmp_path / "run")],
        {"LLMTRAIN_DEBUG": "1"},
    )
    assert ended.status == 2
    assert "in parse" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: unknown flag --n_layers")
