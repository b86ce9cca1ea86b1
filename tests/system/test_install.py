"""Installing keeps a torch that is there, and distributions have all that they need."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import llmtrain
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
        ".git",
        ".venv",
        "runs",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        ".*_cache",
        ".hypothesis",
        "_build",
        "wandb",
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


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and with the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [*build, str(source)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@long_form
def test_a_wheel_has_every_file_of_the_package_and_nothing_else(
    source: Path, distributions: Path
) -> None:
    expected = {f"llmtrain/{name}" for name in files_of(source / "llmtrain")}
    for folder in ("recipes", "accelerate_configs"):
        expected |= {f"llmtrain/{folder}/{name}" for name in files_of(source / folder)}

    (wheel,) = distributions.glob("llmtrain-*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert {name for name in names if ".dist-info/" not in name} == expected


@long_form
def test_a_source_distribution_has_what_its_tests_and_pages_need(
    source: Path, distributions: Path
) -> None:
    (archive,) = distributions.glob("llmtrain-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}

    left_out = {name for name in files_of(source) if name.startswith((".ci/", ".git"))}
    assert files_of(source) - left_out <= names


@long_form
def test_the_metadata_say_what_an_index_shows(distributions: Path) -> None:
    (wheel,) = distributions.glob("llmtrain-*.whl")
    opened = zipfile.ZipFile(wheel)
    (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(opened.read(name))

    assert metadata["Name"] == "llmtrain"
    assert metadata["Version"] == llmtrain.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    for field in ("Author", "Summary", "Keywords", "License-File"):
        assert metadata[field], field
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


@long_form
@pytest.mark.parametrize("pattern", ["llmtrain-*.whl", "llmtrain-*.tar.gz"])
def test_a_distribution_is_all_that_an_empty_folder_needs(
    distributions: Path, tmp_path: Path, pattern: str
) -> None:
    (distribution,) = distributions.glob(pattern)
    venv.create(tmp_path / "env", symlinks=True)
    binaries = tmp_path / "env" / "bin"
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(binaries / "python"), "install"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", "--quiet"]
    subprocess.run([*pip, *options, str(distribution)], check=True, timeout=120)

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
