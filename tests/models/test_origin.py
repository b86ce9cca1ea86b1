"""The files of a local model identify it. They are read once on each machine, until they change."""

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
    """The folder of a model that is large enough for its hash to be kept."""
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
def test_one_of_two_ranks_reads_the_weights_and_a_second_start_does_not(
    model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def starts(launcher: list[str]) -> list[list[str]]:
        ended = run([*launcher, str(script), str(model)]).assert_ok()
        return sorted(line.split() for line in ended.out.splitlines())

    first = starts(torchrun(2))
    sha256 = origin_of(str(model))["sha256"]
    assert first == [[sha256, "False"], [sha256, "True"]]
    assert starts(PYTHON) == [[sha256, "False"]]

    flip_last_byte(model)
    [[changed, has_read]] = starts(PYTHON)
    assert changed != sha256
    assert has_read == "True"


def test_a_check_finds_bytes_that_have_changed_without_a_trace(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model.safetensors"
    state = file_digests._FileState(*[0] * 5)._replace(size=path.stat().st_size)
    monkeypatch.setattr(file_digests, "_state", lambda _: state)
    origin = origin_of(str(model))
    flip_last_byte(model)
    assert origin_of(str(model)) == origin
    with pytest.raises(UserError, match="put those back"):
        check_origin(str(model), origin)
    assert origin_of(str(model)) != origin
