"""The origin of a local model is a hash of its files, which each machine reads until they change."""

import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmtrain import file_digests
from llmtrain.errors import UserError
from llmtrain.models.hub_models import check_origin, origin_of
from tests.launching import PYTHON, run, torchrun

# Prints the origin of a model, and whether this process has read as many bytes as its files have.
SCRIPT = """
import sys
from pathlib import Path
from llmtrain import file_digests
from llmtrain.models.hub_models import origin_of

def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])

file_digests._SETTLING_TIME = 0.0  # the files are new
before = bytes_read()
origin = origin_of(sys.argv[1])
size = Path(sys.argv[1], "model.safetensors").stat().st_size
sys.stdout.write(f"{origin['sha256']} {bytes_read() - before >= size}\\n")
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model that is large enough for its hash to be remembered."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "_SETTLING_TIME", 0.0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1 << 20)}, folder / "model.safetensors")
    return folder


def flip_last_byte(folder: Path) -> None:
    """Change the weights, but neither their size nor the time of their last change."""
    path = folder / "model.safetensors"
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_of_two_ranks_reads_the_weights_and_a_second_start_reads_none(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(launcher: list[str]) -> list[tuple[str, str]]:
        """Return the hash that each process prints, and whether it has read the weights."""
        result = run([*launcher, str(script), str(model)]).assert_ok()
        lines = [line.split() for line in result.out.splitlines()]
        return sorted((sha256, has_read) for sha256, has_read in lines)

    outputs_of_ranks = start(torchrun(2))
    sha256 = origin_of(str(model))["sha256"]
    assert outputs_of_ranks == [(sha256, "False"), (sha256, "True")]
    assert start(PYTHON) == [(sha256, "False")]

    flip_last_byte(model)
    ((new_sha256, has_read),) = start(PYTHON)
    assert new_sha256 != sha256
    assert has_read == "True"


def test_a_check_reads_bytes_that_have_changed_without_a_trace(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the state of the file in the file system changes."""
    with (model / "model.safetensors").open("rb") as file:
        state = file_digests._state(file.fileno())
    monkeypatch.setattr(file_digests, "_state", lambda descriptor: state)
    origin = origin_of(str(model))

    flip_last_byte(model)

    assert origin_of(str(model)) == origin, "the remembered hash"
    with pytest.raises(UserError, match="put those back"):
        check_origin(str(model), origin)
    assert origin_of(str(model)) != origin
