"""The recipes as scripts of uv: their inline metadata, and how uv and `hf jobs` read it."""

import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.clouds.programs import run_program
from tests.environments import environment_with
from tests.launching import BIN, FINETUNE, GPT, PREFERENCE, ROOT, long_form, run

# From PEP 723, "Reference Implementation".
BLOCK = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
# Takes the place of a recipe's code.
PRINT_PACKAGE = "import llmtrain\nprint(llmtrain.__file__)\n"


def metadata_of(script: str) -> dict[str, Any]:
    """Return the inline metadata of a script, as PEP 723 reads it."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer")
    (block,) = [match for match in re.finditer(BLOCK, script) if match["type"] == "script"]
    lines = block["content"].splitlines(keepends=True)
    content = "".join(re.sub("^# ?", "", line) for line in lines)
    metadata: dict[str, Any] = tomllib.loads(content)
    return metadata


def with_code(recipe: str, code: str) -> str:
    """Return a script with the inline metadata of a recipe, and other code."""
    header, end, _ = (ROOT / recipe).read_text().partition("# ///\n")
    return header + end + code


@pytest.mark.parametrize(
    ("recipe", "extras"),
    [
        pytest.param(GPT, set(), id="gpt"),
        pytest.param(FINETUNE, {"lora"}, id="finetune"),
        pytest.param(PREFERENCE, {"lora"}, id="preference"),
    ],
)
def test_a_recipe_begins_with_the_packages_that_it_needs(recipe: str, extras: set[str]) -> None:
    text = (ROOT / recipe).read_text()
    assert text.startswith("# /// script\n")

    metadata = metadata_of(text)
    (dependency,) = metadata["dependencies"]
    requirement = Requirement(dependency)
    assert requirement.name == "llmtrain"
    assert requirement.extras == extras
    assert f"python_requires = {metadata['requires-python']}" in (ROOT / "setup.cfg").read_text()


def test_hf_jobs_takes_a_recipe(tmp_path: Path) -> None:
    hf = shutil.which("hf", path=str(BIN))
    if hf is None or "--dry-run" not in run([hf, "jobs", "uv", "run", "--help"]).out:
        pytest.skip("needs a huggingface_hub whose `hf jobs uv run` has --dry-run")

    words = f"jobs uv run --dry-run --flavor a100-large {FINETUNE} --max_steps 5"
    ended = run([hf, *words.split()], {"HF_HOME": str(tmp_path)}).assert_ok()
    assert re.search(rf"script +{FINETUNE}\n.*args +--max_steps 5\n", ended.out, re.DOTALL)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a wheel like that of a released llmtrain, but without dependencies.

    Returns:
        The folder of the wheel.
    """
    folder = tmp_path_factory.mktemp("wheels")
    info = "llmtrain-0.1.0.dist-info"
    files = {
        "llmtrain/__init__.py": "",
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\nName: llmtrain\nVersion: 0.1.0\nProvides-Extra: lora\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])

    with zipfile.ZipFile(folder / "llmtrain-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return folder


def find_uv() -> Path:
    return environment_with("uv", ["uv==0.13.9"]) / "bin" / "uv"


@long_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", [GPT, FINETUNE, PREFERENCE])
def test_uv_runs_one_file_once_the_package_is_on_an_index(
    recipe: str, wheels: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    script = tmp_path / "recipe.py"
    script.write_text(with_code(recipe, PRINT_PACKAGE))
    options = f"--no-index --python {sys.executable} --cache-dir {cache}"
    uv_run = [find_uv(), "run", *options.split()]

    before_release = run_program([*uv_run, script])
    assert before_release.status != 0
    assert "No solution found" in before_release.err

    after_release = run_program([*uv_run, "--find-links", wheels, script]).assert_ok()
    assert Path(after_release.out.strip()).is_relative_to(cache)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Write a clone of the repository that uv can install at once.

    The package is empty and has no dependencies, which would be gigabytes. recipes/gpt.py prints
    the path of the package.
    """
    folder = tmp_path / "clone"
    (folder / "llmtrain").mkdir(parents=True)
    (folder / "llmtrain" / "__init__.py").write_text("")
    (folder / "recipes").mkdir()
    (folder / GPT).write_text(with_code(GPT, PRINT_PACKAGE))
    shutil.copy(ROOT / "pyproject.toml", folder)

    config = (ROOT / "setup.cfg").read_text()
    config = re.sub(r"(?ms)^install_requires =.*?\n\n", "", config)
    config = re.sub(
        r"(?ms)^package_dir =.*?\npython_requires", "packages = llmtrain\npython_requires", config
    )
    config = config.replace("attr: llmtrain._version.__version__", "0.1.0")
    config = config.replace("file: README.md", "")
    (folder / "setup.cfg").write_text(config)
    return folder


@long_form
@pytest.mark.timeout(600)
def test_uv_runs_a_recipe_of_a_clone_with_the_code_of_the_clone(
    clone: Path, tmp_path: Path
) -> None:
    """This needs no released package: uv does not read the metadata of a script that Python runs."""
    options = (
        f"--python {sys.executable} --cache-dir {tmp_path}/cache "
        f"--directory {clone} --no-project --with-editable ."
    )

    ended = run_program([find_uv(), "run", *options.split(), "python", GPT]).assert_ok()

    assert Path(ended.out.strip()) == clone / "llmtrain" / "__init__.py"
    assert not (clone / ".venv").exists(), (
        "it would be mistaken for the environment of `make train`"
    )
