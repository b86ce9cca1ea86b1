"""A run with a mirror: whatever happens to the storage or to the run, nothing of either is lost."""

import random
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from llmtrain.record.history import read_lines
from tests.buckets import KEY, SECRET, Proxy, bucket_server
from tests.forked import run_forked
from tests.launching import (
    PYTHON,
    TINY,
    accelerate,
    long_form,
    read_json,
    start_process,
    stop_group,
    write_text,
)
from tests.record.checkpoint_files import tensors_digest
from tests.record.mirrored_files import assert_never_half, count_puts, files_at, files_of

SCRIPT = "tests/system/mirrored_gpt.py"
ADDRESS = "s3://bucket/gpt"
FLAGS = [*TINY, *shlex.split("--max_steps 12 --save_steps 3 --sample_prompts a --log_rows")]


@pytest.fixture
def bucket() -> Iterator[Proxy]:
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def command(launcher: list[str], text: Path, folder: Path, *flags: str) -> list[str]:
    return [*launcher, SCRIPT, *FLAGS, "--dataset", str(text), "--output_dir", str(folder), *flags]


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights and states of a run without a mirror."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_forked(command(PYTHON, text, folder)).assert_ok()
    return weights_of(folder)


def weights_of(folder: Path, step: int = 12) -> str:
    return tensors_digest(folder / f"checkpoints/step-{step:08d}")


def mirror_events(folder: Path) -> list[str]:
    events = read_lines(folder / "events.jsonl")
    return [event["text"] for event in events if event["kind"] == "mirror"]


def assert_no_secrets(*contents: bytes | str) -> None:
    for content in contents:
        text = content if isinstance(content, str) else content.decode(errors="replace")
        assert KEY not in text
        assert SECRET not in text


@pytest.mark.parametrize(
    "launcher", [PYTHON, pytest.param(accelerate("cpu_ddp"), marks=long_form)], ids=["one", "ddp"]
)
def test_a_mirror_ends_with_the_files_of_the_run_and_is_refused_to_another_run(
    bucket: Proxy, text: Path, tmp_path: Path, launcher: list[str]
) -> None:
    folder = tmp_path / "run"
    ended = run_forked(command(launcher, text, folder, "--mirror", ADDRESS)).assert_ok()
    at_address = files_at(ADDRESS)
    assert at_address == files_of(folder)
    assert {"run.json", "metrics.jsonl", "samples.jsonl", "rows.jsonl"} < at_address.keys()
    assert read_json(folder / "status.json")["mirrored_step"] == 12
    assert_no_secrets(*at_address.values(), ended.out, ended.err)

    second = run_forked(command(launcher, text, folder, "--mirror", ADDRESS))
    assert second.status == 2
    run_id = read_json(folder / "run.json")["run_id"]
    assert f"error: --mirror {ADDRESS} is claimed by run {run_id}" in second.err
    assert files_at(ADDRESS) == at_address
    assert read_json(tmp_path / "run-2/status.json")["state"] == "failed"
    # With another address, the same command goes on with the run that was refused.
    run_forked(command(launcher, text, folder, "--mirror", f"{ADDRESS}-2")).assert_ok()
    assert files_at(f"{ADDRESS}-2") == files_of(tmp_path / "run-2")


@pytest.mark.parametrize("fault", ["expired", pytest.param("503", marks=long_form)])
def test_a_mirror_that_fails_changes_neither_the_weights_nor_the_exit_status(
    bucket: Proxy, text: Path, tmp_path: Path, undisturbed: str, fault: str
) -> None:
    folder = tmp_path / "run"
    bucket.fault = lambda method, path: fault if "/checkpoints/" in path else ""
    ended = run_forked(command(PYTHON, text, folder, "--mirror", ADDRESS)).assert_ok()

    assert weights_of(folder) == undisturbed
    (event,) = mirror_events(folder)
    assert f"{ADDRESS}/checkpoints" in event
    assert ended.out.count(event) == 1
    assert not [name for name in files_at(ADDRESS) if "MANIFEST" in name]
    assert_no_secrets(*files_of(folder).values(), ended.out, ended.err)


def test_a_login_that_has_expired_ends_a_start_with_one_line(
    bucket: Proxy, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    bucket.fault = lambda method, path: "expired"
    ended = run_forked(command(PYTHON, text, folder, "--mirror", ADDRESS))
    assert ended.status == 2
    assert ended.err.count("error: ") == 1
    assert f"error: {ADDRESS}/claim.json: the storage refuses" in ended.err
    assert read_json(folder / "status.json")["step"] == 0
    assert_no_secrets(*files_of(folder).values(), ended.out, ended.err)


@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=long_form)])
def test_a_run_that_is_killed_during_an_upload_leaves_no_half_and_takes_its_claim_over(
    bucket: Proxy, text: Path, tmp_path: Path, kills: int
) -> None:
    length = shlex.split("--max_steps 200 --save_steps 10 --n_embd 64")
    run_forked(command(PYTHON, text, tmp_path / "undisturbed", *length)).assert_ok()
    draw = random.Random(kills)
    folder = tmp_path / "run"
    mirrored = command(PYTHON, text, folder, *length, "--mirror", ADDRESS)
    for _ in range(kills):
        process = start_process(mirrored)
        try:
            uploads = count_puts(bucket, "/checkpoints/") + draw.randrange(1, 12)
            while count_puts(bucket, "/checkpoints/") < uploads and process.poll() is None:
                time.sleep(0.001)
        finally:
            stop_group(process)
        assert process.returncode == -signal.SIGKILL, process.communicate()

    ended = run_forked(mirrored).assert_ok()
    assert "resumes from step" in ended.out
    assert weights_of(folder, 200) == weights_of(tmp_path / "undisturbed", 200)
    assert files_at(ADDRESS) == files_of(folder)
    assert_never_half(bucket, len(files_of(folder / "checkpoints/step-00000200")))
