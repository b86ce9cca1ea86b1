"""The recipes as scripts of uv: their inline metadata, and what uv and `hf jobs` do with it."""

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

RECIPES = [GPT, FINETUNE, PREFERENCE]
# From PEP 723, "Reference Implementation".
BLOCK = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"


def metadata_of(text: str) -> dict[str, Any]:
    """Return the inline metadata of a script, read as PEP 723 says."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer")
    (block,) = [match for match in re.finditer(BLOCK, text) if match["type"] == "script"]
    lines = block["content"].splitlines(keepends=True)
    content = "".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    metadata: dict[str, Any] = tomllib.loads(content)
    return metadata


@pytest.mark.parametrize(
    ("recipe", "extras"), [(GPT, set()), (FINETUNE, {"lora"}), (PREFERENCE, {"lora"})]
)
def test_a_recipe_begins_with_the_packages_that_it_needs(recipe: str, extras: set[str]) -> None:
    text = (ROOT / recipe).read_text()
    assert text.startswith("# /// script\n")
    metadata = metadata_of(text)
    (requirement,) = [Requirement(line) for line in metadata["dependencies"]]
    assert (requirement.name, requirement.extras) == ("llmtrain", extras)
    assert f"python_requires = {metadata['requires-python']}" in (ROOT / "setup.cfg").read_text()


def test_hf_jobs_takes_a_recipe(tmp_path: Path) -> None:
    hf = shutil.which("hf", path=str(BIN))
    if hf is None or "--dry-run" not in run([hf, "jobs", "uv", "run", "--help"]).out:
        pytest.skip("needs a huggingface_hub whose `hf jobs uv run` has --dry-run")
    command = [hf, "jobs", "uv", "run", "--dry-run", "--flavor", "a100-large", FINETUNE]
    ended = run([*command, "--max_steps", "5"], {"HF_HOME": str(tmp_path)}).assert_ok()
    assert re.search(rf"script +{FINETUNE}\n.*args +--max_steps 5\n", ended.out, re.DOTALL)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel that stands in for the released package, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheels")
    info = "llmtrain-0.1.0.dist-info"
    files = {
        "llmtrain/__init__.py": "",
        f"{info}/METADATA": (
            "Metadata-Version: 2.1\nName: llmtrain\nVersion: 0.1.0\nProvides-Extra: lora\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "llmtrain-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return folder


@long_form
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_uv_runs_one_file_once_the_package_is_on_an_index(
    recipe: str, wheels: Path, tmp_path: Path
) -> None:
    uv = environment_with("uv", ["uv==0.13.9"]) / "bin" / "uv"
    script = tmp_path / "recipe.py"
    header, end, _ = (ROOT / recipe).read_text().partition("# ///\n")
    script.write_text(f"{header}{end}import llmtrain\nprint(llmtrain.__file__)\n")
    options = ["--no-index", "--python", sys.executable, "--cache-dir", tmp_path / "cache"]

    before_release = run_program([uv, "run", *options, script])
    assert before_release.status != 0
    assert "No solution found" in before_release.err
    ended = run_program([uv, "run", *options, "--find-links", wheels, script]).assert_ok()
    assert Path(ended.out.strip()).is_relative_to(tmp_path / "cache")


@long_form
@pytest.mark.timeout(600)
def test_uv_runs_a_recipe_of_a_clone_with_the_code_of_the_clone(tmp_path: Path) -> None:
    """This needs no released package: uv does not read the metadata of what Python itself runs."""
    uv = environment_with("uv", ["uv==0.13.9"]) / "bin" / "uv"
    clone = tmp_path / "clone"
    (clone / "llmtrain").mkdir(parents=True)
    (clone / "recipes").mkdir()
    (clone / "llmtrain" / "__init__.py").write_text("")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    config = (clone / "setup.cfg").read_text()
    # The dependencies would be gigabytes.
    config = re.sub(r"(?ms)^install_requires =.*?\n\n", "", config)
    config = re.sub(
        r"(?ms)^package_dir =.*?\npython_requires", "packages = llmtrain\npython_requires", config
    )
    config = config.replace("attr: llmtrain._version.__version__", "0.1.0")
    (clone / "setup.cfg").write_text(config.replace("file: README.md", ""))
    header, end, _ = (ROOT / GPT).read_text().partition("# ///\n")
    (clone / GPT).write_text(f"{header}{end}import llmtrain\nprint(llmtrain.__file__)\n")

    command = [uv, "run", "--python", sys.executable, "--cache-dir", tmp_path / "cache"]
    command += ["--directory", clone, "--no-project", "--with-editable", ".", "python", GPT]
    ended = run_program(command).assert_ok()
    assert not (clone / ".venv").exists(), "make train has another environment there"
    assert Path(ended.out.strip()) == clone / "llmtrain" / "__init__.py"
