"""Installing keeps a torch that is there, and the distributions have all that they need."""

import email
import os
import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import llmtrain
from tests.launching import PYTHON, ROOT, TINY, long_form, run, write_text

# Files of a checkout that are not part of the project.
LEFT_OUT = shutil.ignore_patterns(
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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the project's files, so that an editable install does not touch the checkout."""
    folder = tmp_path_factory.mktemp("source") / "llmtrain"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that finds every package of this one after its own packages.

    Returns:
        The folder of its own packages.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "everything_else.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return site


# --- a torch that is there


def environment_with_torch(folder: Path, version: str) -> Path:
    """Make an environment in which a package named torch has a version, and return its Python."""
    site = make_environment(folder)
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("somebody\n")
    return folder / "bin" / "python"


def install_editable(python: Path, source: Path) -> subprocess.CompletedProcess:
    """Install the project into the environment of a Python. Pip finds no other torch."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    options = "--no-index --no-build-isolation --disable-pip-version-check"
    pip_install = [*PYTHON, "-m", "pip", "--python", str(python), "install", *options.split()]
    return subprocess.run(
        [*pip_install, "--editable", str(source)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
    )


def test_a_torch_that_is_there_is_kept(source: Path, tmp_path: Path) -> None:
    python = environment_with_torch(tmp_path / "env", "2.11.0+mine")

    result = install_editable(python, source)
    assert result.returncode == 0, result.stdout + result.stderr

    code = "import importlib.metadata as m, torch; print(m.version('torch'), torch.__version__)"
    versions = subprocess.check_output([python, "-c", code], text=True).split()
    assert versions == ["2.11.0+mine", "2.11.0+mine"]


def test_a_torch_that_is_too_old_is_not_kept(source: Path, tmp_path: Path) -> None:
    """Pip would replace it. Without an index, it cannot, so that the installation fails."""
    python = environment_with_torch(tmp_path / "env", "2.10.0+mine")

    result = install_editable(python, source)

    assert result.returncode != 0
    assert "torch>=2.11" in result.stdout + result.stderr


# --- the distributions


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and from it the wheel. Return the folder of both."""
    folder = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [*PYTHON, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture
def wheel(distributions: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = distributions.glob("llmtrain-*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@long_form
def test_a_wheel_has_every_file_of_the_package_and_nothing_else(
    source: Path, wheel: zipfile.ZipFile
) -> None:
    expected = {f"llmtrain/{name}" for name in files_of(source / "llmtrain")}
    for folder in ("recipes", "accelerate_configs"):
        expected |= {f"llmtrain/{folder}/{name}" for name in files_of(source / folder)}

    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


@long_form
def test_a_source_distribution_has_the_files_that_its_tests_and_pages_need(
    source: Path, distributions: Path
) -> None:
    (path,) = distributions.glob("llmtrain-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    of_repository = {name for name in files_of(source) if name.startswith((".ci/", ".git"))}
    assert files_of(source) - of_repository <= names


@pytest.fixture
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


@long_form
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Name", "llmtrain"),
        ("Version", llmtrain.__version__),
        ("Requires-Python", ">=3.11"),
        ("License-Expression", "Apache-2.0"),
        ("Description-Content-Type", "text/markdown"),
    ],
)
def test_the_metadata_have_the_values_that_an_index_shows(
    field: str, value: str, metadata: Message
) -> None:
    assert metadata[field] == value


@long_form
@pytest.mark.parametrize("field", ["Author", "Summary", "Keywords", "License-File"])
def test_the_metadata_have_the_texts_that_an_index_shows(field: str, metadata: Message) -> None:
    assert metadata[field]


@long_form
def test_the_metadata_say_that_the_package_is_typed(metadata: Message) -> None:
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


@long_form
@pytest.mark.parametrize("pattern", ["llmtrain-*.whl", "llmtrain-*.tar.gz"])
def test_a_distribution_is_all_that_an_empty_folder_needs(
    distributions: Path, tmp_path: Path, pattern: str
) -> None:
    (distribution,) = distributions.glob(pattern)
    site = make_environment(tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    options = "--no-index --no-deps --no-build-isolation --ignore-installed --quiet"
    pip_install = [*PYTHON, "-m", "pip", "--python", str(programs / "python"), "install"]
    subprocess.run([*pip_install, *options.split(), str(distribution)], check=True, timeout=120)

    folder = tmp_path / "empty"
    folder.mkdir()
    write_text(folder / "small.txt")
    flags = " ".join([*TINY, "--dataset", "small.txt"])
    assert_installed = (
        f'import llmtrain.recipes.finetune as f; assert f.__file__.startswith("{site}")'
    )
    commands = (
        "llmtrain init mine --recipe gpt --config cpu",
        f"python -m accelerate.commands.launch --config_file mine/cpu.yaml mine/gpt.py {flags}",
        f"python -m llmtrain.recipes.gpt {flags} --output_dir runs/module",
        "llmtrain runs --finished runs/module",
        "llmtrain report runs/gpt",
        f"python -c '{assert_installed}'",
    )
    environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin"}
    for command in commands:
        run(["bash", "-ec", f"cd {folder}; {command}"], environment).assert_ok()

    assert (folder / "runs" / "gpt" / "report.html").is_file()
