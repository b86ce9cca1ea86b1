"""The package as a whole: what an import costs, pinned versions, public names."""

import ast
import configparser
import inspect
import re
import subprocess
import sys
import warnings
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import llmtrain
from tests.launching import ROOT, run


def test_a_pinned_version_that_an_older_python_cannot_have_is_pinned_for_newer_ones_only() -> None:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    oldest = Version(metadata["options"]["python_requires"].removeprefix(">="))
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    installed = {canonicalize_name(found.name): found for found in distributions()}
    for pin in pins:
        found = installed.get(canonicalize_name(pin.name))
        takes = SpecifierSet(found.metadata["Requires-Python"] or "") if found else SpecifierSet()
        python = {"python_version": str(oldest), "python_full_version": f"{oldest}.0"}
        applies = pin.marker is None or pin.marker.evaluate(python)
        assert oldest in takes or not applies, (
            f"constraints.txt: {pin} needs Python {takes}; give it a marker"
        )


def third_party_imports(folder: Path) -> dict[str, Path]:
    """Return every top-level module of other packages that is imported, and a file that does so."""
    found = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                continue
            for name in names:
                found[name.partition(".")[0]] = path
    return {
        name: path
        for name, path in found.items()
        if name not in sys.stdlib_module_names and name not in ("llmtrain", "recipes")
    }


@pytest.mark.parametrize("folder", ["llmtrain", "recipes"])
def test_every_package_that_is_imported_is_declared(folder: str) -> None:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    names_of_extras = ("lora", "lab", "four_bits")
    extras = [metadata["options.extras_require"][name] for name in names_of_extras]
    lines = "\n".join([metadata["options"]["install_requires"], *extras]).split()
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    distributions_of = packages_distributions()

    undeclared = {}
    for module, path in third_party_imports(ROOT / folder).items():
        names = {canonicalize_name(name) for name in distributions_of.get(module, [module])}
        if not names & declared:
            undeclared[module] = str(path)

    assert not undeclared, "imported, and not declared in setup.cfg"


def test_only_one_module_writes_json_so_that_none_writes_nan() -> None:
    """`json_text` of files.py writes null for numbers that JSON does not have."""
    writers = set()
    for path in (ROOT / "llmtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("json.dump")
            is_import = isinstance(node, ast.ImportFrom) and node.module == "json"
            if is_call or is_import:
                writers.add(path.name)
    assert writers == {"files.py"}


def test_no_code_looks_for_one_spelling_of_a_flag() -> None:
    """Users write --output_dir and --output-dir; `value_of_flag` finds both."""
    searches = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in (ROOT / "llmtrain").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        if isinstance(node.ops[0], ast.In | ast.NotIn)
        if isinstance(node.left, ast.Constant) and str(node.left.value).startswith("--")
    ]
    assert searches == []


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys, llmtrain\n"
        "heavy = {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)\n"
        "own = [name for name in sys.modules if name.startswith('llmtrain.')]\n"
        "assert not heavy, heavy\n"
        "assert own == ['llmtrain._version'], own\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_type_checker_sees_the_public_names_that_are_imported_on_first_use() -> None:
    tree = ast.parse((ROOT / "llmtrain" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name, "a plain import is not re-exported"
        imported[alias.name] = node.module

    assert imported == llmtrain._MODULES
    assert list(imported) == list(llmtrain._MODULES)
    assert llmtrain.__all__ == ["__version__", *imported]


@pytest.mark.parametrize(
    ("recipe", "arguments", "expected_text"),
    [
        ("gpt", ["--help"], "--n_embd"),
        ("gpt", ["--print_config"], "#max_steps: "),
        ("gpt", ["--max_steps", "many"], "--max_steps: invalid int value"),
        ("finetune", ["--lora_rank", "8"], "unknown flag --lora_rank: use --lora_r 16"),
        ("preference", ["--beta", "-1"], "--beta -1.0 is out of range"),
        ("preference", ["--config", "bad.yaml"], "is not YAML"),
    ],
)
def test_a_recipe_says_what_is_wrong_with_its_flags_without_loading_torch(
    recipe: str, arguments: list[str], expected_text: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("beta: [")
    program = ROOT / "recipes" / f"{recipe}.py"
    command = [sys.executable, "-X", "importtime", program, *arguments]

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
    assert result.returncode == (0 if arguments in (["--help"], ["--print_config"]) else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"], "nothing was started"
    assert expected_text in "".join(printed)
    assert "yaml" in imported_modules
    assert not imported_modules & {"torch", "accelerate", "datasets", "wandb"}


@pytest.mark.parametrize("name", llmtrain.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(llmtrain, name)
    description = value if isinstance(value, str) else inspect.getdoc(value)
    assert description
    assert not description.startswith(f"{name}("), "a dataclass without a docstring"


def test_the_changelog_begins_with_the_version_that_this_is() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == llmtrain.__version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = llmtrain.nothing


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = [*sorted((ROOT / "recipes").glob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]


@pytest.mark.parametrize(
    "path",
    [*PAGES, *PROGRAMS, ROOT / "docs" / "notebook.ipynb"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_names_that_docs_and_recipes_use_are_public(path: Path) -> None:
    text = path.read_text()
    names = {*re.findall(r"\blt\.([A-Za-z_]\w*)", text)}
    names |= {*re.findall(r"`llmtrain\.([A-Z]\w*)`", text)}
    assert names <= {*llmtrain.__all__}


def test_a_deprecation_is_an_error_here_and_in_a_process_that_a_test_starts() -> None:
    with pytest.raises(FutureWarning):
        warnings.warn("the old way", FutureWarning, stacklevel=1)
    ended = run([sys.executable, "-c", "import warnings; warnings.warn('old', FutureWarning)"])
    assert "FutureWarning: old" in ended.err
    assert ended.status == 1


def test_what_libraries_do_among_themselves_is_no_error() -> None:
    text = "`is_gradient_checkpointing` is deprecated and will be removed in v6."
    warnings.warn(text, FutureWarning, stacklevel=1)
    code = f"import warnings; warnings.warn({text!r}, FutureWarning)"
    run([sys.executable, "-c", code]).assert_ok()
