"""Installing keeps a torch that is there, and the distributions have all that they need."""

import shutil
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.launching import PYTHON, ROOT, TINY, long_form, run, write_text

# Variables for pip and build: a deprecation in them is no fault of this package.
FOR_PIP = {"PYTHONPATH": "", "PYTHONWARNINGS": ""}
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


@long_form
def test_a_torch_that_is_there_is_kept(source: Path, tmp_path: Path) -> None:
    version = "2.11.0+mine"
    site = make_environment(tmp_path / "env")
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    (info / "INSTALLER").write_text("somebody\n")

    # Pip finds no other torch.
    python = tmp_path / "env" / "bin" / "python"
    options = "--no-index --no-build-isolation --disable-pip-version-check --isolated"
    pip_install = [*PYTHON, "-m", "pip", "--python", str(python), "install", *options.split()]
    run([*pip_install, "--editable", str(source)], FOR_PIP).assert_ok()

    code = "import importlib.metadata as m, torch; print(m.version('torch'), torch.__version__)"
    assert subprocess.check_output([python, "-c", code], text=True).split() == [version, version]


# --- the distributions


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and from it the wheel. Return the folder of both."""
    folder = tmp_path_factory.mktemp("dist")
    build = [*PYTHON, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    run(build, FOR_PIP).assert_ok()
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@long_form
def test_the_distributions_have_every_file_that_they_need(
    source: Path, distributions: Path
) -> None:
    [wheel] = distributions.glob("llmtrain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        skill = archive.read("llmtrain/.agents/skills/llmtrain/SKILL.md").decode()
    expected = {f"llmtrain/{name}" for name in files_of(source / "llmtrain")}
    for folder in ("recipes", "accelerate_configs"):
        expected |= {f"llmtrain/{folder}/{name}" for name in files_of(source / folder)}
    assert in_wheel == expected
    # The limits of the Agent Skills specification.
    frontmatter = yaml.safe_load(skill.split("---")[1])
    assert frontmatter["name"] == "llmtrain"
    assert 0 < len(frontmatter["description"]) <= 1024

    [source_distribution] = distributions.glob("llmtrain-*.tar.gz")
    with tarfile.open(source_distribution) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    of_repository = {name for name in files_of(source) if name.startswith((".ci/", ".git"))}
    assert files_of(source) - of_repository <= in_source


@long_form
def test_a_wheel_is_all_that_an_empty_folder_needs(distributions: Path, tmp_path: Path) -> None:
    [wheel] = distributions.glob("llmtrain-*.whl")
    site = make_environment(tmp_path / "env")
    programs = tmp_path / "env" / "bin"
    options = "--no-index --no-deps --no-build-isolation --ignore-installed --quiet"
    pip_install = [*PYTHON, "-m", "pip", "--python", str(programs / "python"), "install"]
    run([*pip_install, *options.split(), str(wheel)], FOR_PIP).assert_ok()

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
        f"python -c '{assert_installed}'",
    )
    environment = {"PYTHONPATH": "", "PATH": f"{programs}:/usr/bin:/bin"}
    for command in commands:
        run(["bash", "-ec", f"cd {folder}; {command}"], environment).assert_ok()
