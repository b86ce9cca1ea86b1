"""Installing into an environment that has its own torch keeps that torch."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.launching import ROOT, TINY, long_form, run, write_text


def environment_with_torch(folder: Path, version: str) -> Path:
    """A virtual environment that has every package of this one, but a torch of its own in front of them."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        ).strip()
    )
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("somebody\n")
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def install(python: Path, source: Path) -> subprocess.CompletedProcess:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-index",
        "--no-build-isolation",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return subprocess.run(
        [*pip, "--disable-pip-version-check", "--editable", str(source)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**env, "PIP_CONFIG_FILE": os.devnull},  # no other source of a torch either
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files, so that an editable install does not touch the checkout."""
    folder = tmp_path_factory.mktemp("source") / "llmtrain"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def torch_of(python: Path) -> str:
    code = "import importlib.metadata as m, torch; print(m.version('torch'), torch.__version__)"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def test_a_torch_that_is_there_is_kept(source: Path, tmp_path: Path) -> None:
    python = environment_with_torch(tmp_path / "env", "2.11.0+mine")
    done = install(python, source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch_of(python) == "2.11.0+mine 2.11.0+mine"


def test_a_torch_that_is_too_old_would_not_be_kept(source: Path, tmp_path: Path) -> None:
    """The test above can fail: without an index, a torch that does not satisfy the package ends the install."""
    python = environment_with_torch(tmp_path / "env", "2.10.0+mine")
    done = install(python, source)
    assert done.returncode != 0
    assert "torch>=2.11" in done.stdout + done.stderr


@long_form
def test_the_wheel_is_all_one_needs_in_an_empty_folder(source: Path, tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("llmtrain-*.whl")
    venv.create(tmp_path / "env", symlinks=True)
    binaries = tmp_path / "env" / "bin"
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(binaries / "python"),
        "install",
        "--no-index",
        "--no-deps",
    ]
    pip.append("--ignore-installed")
    subprocess.run([*pip, "--quiet", str(wheel)], check=True, timeout=60)
    here = tmp_path / "empty"
    here.mkdir()
    write_text(here / "small.txt")
    flags = " ".join([*TINY, "--dataset", "small.txt"])
    steps = (
        "llmtrain init mine --recipe gpt --config cpu",
        f"python -m accelerate.commands.launch --config_file mine/cpu.yaml mine/gpt.py {flags}",
        f"python -m llmtrain.recipes.gpt {flags} --output_dir runs/module",
        "llmtrain runs --finished runs/module",
        "llmtrain report runs/gpt",
        f"python -c 'import llmtrain.recipes.finetune as f; assert f.__file__.startswith(\"{site}\")'",
    )
    for step in steps:
        ended = run(
            ["bash", "-ec", f"cd {here}; {step}"],
            {"PYTHONPATH": "", "PATH": f"{binaries}:/usr/bin:/bin"},
        )
        ended.assert_ok()
    assert (here / "runs" / "gpt" / "report.html").is_file()
