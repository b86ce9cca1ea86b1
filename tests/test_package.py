"""The package as a whole: what an import costs, its requirements, its public names, its version."""

import ast
import configparser
import inspect
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import llmtrain
from tests.launching import ROOT

# --- imports


def third_party_imports(folder: Path) -> set[str]:
    """Return the top-level modules of other packages that the files of a folder import."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - {*sys.stdlib_module_names, "llmtrain", "recipes"}


@pytest.mark.parametrize("folder", ["llmtrain", "recipes"])
def test_every_package_that_is_imported_is_declared(folder: str) -> None:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    names_of_extras = ("lora", "lab", "four_bits", "s3")
    extras = [metadata["options.extras_require"][name] for name in names_of_extras]
    lines = "\n".join([metadata["options"]["install_requires"], *extras]).split()
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions_of = packages_distributions()

    undeclared = []
    for module in sorted(third_party_imports(ROOT / folder)):
        names = {canonicalize_name(name) for name in distributions_of.get(module, [module])}
        if not names & declared:
            undeclared.append(module)

    assert not undeclared, "imported, and not declared in setup.cfg"


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys, llmtrain\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)\n"
        "own = [name for name in sys.modules if name.startswith('llmtrain.')]\n"
        "assert not heavy, heavy\n"
        "assert own == ['llmtrain.versions'], own\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "status", "expected_text"),
    [
        (["--help"], 0, "--n_embd"),
        (["--print_config"], 0, "#max_steps: "),
        (["--max_steps", "many"], 2, "--max_steps: "),
        (["--config", "bad.yaml"], 2, "bad.yaml"),
    ],
)
def test_a_recipe_answers_flags_without_loading_torch(
    arguments: list[str], status: int, expected_text: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("n_embd: [")
    command = [sys.executable, "-X", "importtime", ROOT / "recipes" / "gpt.py", *arguments]

    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    imported_modules = set()
    printed = [result.stdout]
    for line in result.stderr.splitlines():
        if line.startswith("import time"):
            imported_modules.add(line.rpartition("|")[2].strip())
        else:
            printed.append(line)
    assert result.returncode == status
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"], "nothing was started"
    assert expected_text in "".join(printed)
    assert "yaml" in imported_modules
    assert not imported_modules & {"torch", "accelerate", "datasets", "wandb"}


# --- public names


def test_a_type_checker_sees_the_public_names_that_are_imported_on_first_use() -> None:
    tree = ast.parse((ROOT / "llmtrain" / "__init__.pyi").read_text())
    imported = {}
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name, "a plain import is not re-exported"
        imported[alias.name] = node.module

    assert imported.pop("__version__") == "llmtrain.versions"
    assert imported == llmtrain._MODULES
    assert llmtrain.__all__ == ["__version__", *imported]


def test_every_public_name_has_a_description() -> None:
    for name in llmtrain.__all__:
        value = getattr(llmtrain, name)
        description = value if isinstance(value, str) else inspect.getdoc(value)
        assert description, name
        assert not description.startswith(f"{name}("), "a dataclass without a docstring"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llmtrain.nothing


def test_the_names_that_docs_and_recipes_use_are_public() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "notebook.ipynb", *ROOT.glob("docs/**/*.md")]
    for path in [*pages, *ROOT.glob("recipes/*.py"), *ROOT.glob("docs/**/*.py")]:
        text = path.read_text()
        names = {*re.findall(r"\blt\.([A-Za-z_]\w*)", text)}
        names |= {*re.findall(r"`llmtrain\.([A-Z]\w*)`", text)}
        assert names <= {*llmtrain.__all__}, path


# --- the repository


def test_changelog_and_citation_have_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == llmtrain.__version__
    assert f"\nversion: {llmtrain.__version__}\n" in (ROOT / "CITATION.cff").read_text()
