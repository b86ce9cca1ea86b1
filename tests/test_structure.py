"""Rules about the structure of the package that neither a type checker nor import-linter checks."""

import ast
import inspect
import re
from pathlib import Path

import llmtrain
from llmtrain.training.step import train_step
from tests.launching import PYTHON, long_form, run

PACKAGE = Path(llmtrain.__file__).parent
ROOT = PACKAGE.parent

# Packages that make the processes, or start and teach about them.
MAY_READ_RANKS = ("parallel", "launching", "lessons", "lab", "commands")
READS_RANKS = re.compile(
    r"\.(num_processes|process_index|local_process_index|is_main_process|is_local_main_process)\b"
    r"|\bget_(rank|world_size)\("
)


def lines_that_read_ranks() -> list[str]:
    """Lines that read ranks from Accelerate or torch, outside the packages that may."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0]
        if package in MAY_READ_RANKS:
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if READS_RANKS.search(line):
                found.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    return found


def test_ranks_are_read_from_the_engine() -> None:
    """Who this process is has one answer: Ranks, which the run and its engine hold."""
    assert READS_RANKS.search("if accelerator.is_main_process:")
    assert READS_RANKS.search("rank = dist.get_rank()")
    assert lines_that_read_ranks() == []


def test_a_training_step_has_few_parameters() -> None:
    assert len(inspect.signature(train_step).parameters) <= 6


# Functions that catch a ValueError, or any exception, and raise an error for the user instead, with
# the call that may fail there. Any other code lets such an error pass: it may be a bug.
RENAMING = {
    "yaml_file.py:_read_yaml": "yaml.load",
    "flag_syntax.py:_value_of_word": "the type of the flag, such as int, or its own parser",
    "chat_template.py:template_text": "reads a file that the user names",
    "corpus.py:_store": "the tokenizer",
    "readers.py:_read_jsonl": "json.loads",
    "readers.py:_read_json": "json.loads",
    "hub.py:_load_splits": "datasets.load_dataset",
    "tokenizer.py:load_tokenizer": "AutoTokenizer.from_pretrained",
    "errors.py:as_user_error": "its callers each name the call",
    "children.py:read_accelerate_config": "yaml.safe_load",
    "config.py:parse_max_length": "int",
    "settings.py:steps_or_fraction": "float",
    "lora.py:add_lora": "peft.get_peft_model",
    "part_states.py:_load": "load_state_dict of a part, which is the user's own code",
    "step.py:_step_optimizer": "a step of the user's optimizer, if the weights are sharded",
    "parts.py:_checked_fingerprint": "the fingerprint of a part, which is the user's own code",
    "probe.py:trying": "the forward pass of a class of transformers",
    "heartbeat.py:context": "only for a lost connection",
    "recipe_model.py:run_to_model": "runs the user's own program",
    "callbacks.py:context": "only if there is no memory left",
}


def renaming_functions() -> list[str]:
    """Return the functions that turn errors of any origin into errors for the user."""
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("recipes/*.py")]):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(node, ast.ExceptHandler) and renames(node) for node in ast.walk(function)
            ):
                found.append(f"{path.name}:{function.name}")
    return found


def renames(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches errors of any origin, and raises one for the user."""
    caught = {
        node.id
        for node in ast.walk(handler.type or ast.Name("Exception"))
        if isinstance(node, ast.Name)
    }
    made = {
        node.id for node in ast.walk(ast.Module(handler.body, [])) if isinstance(node, ast.Name)
    }
    is_broad = not caught.isdisjoint({"ValueError", "Exception", "BaseException"})
    return is_broad and not made.isdisjoint({"UserError"})


def test_an_error_is_renamed_only_next_to_the_call_that_raises_it() -> None:
    assert sorted(renaming_functions()) == sorted(RENAMING)


# A statement that imports, in a file or in a program that stands in a string.
IMPORT = re.compile(r"^ *(?:from \S+ )?import (?:\([^)]*\)|.*)", re.MULTILINE)


def imported_files_of_tests(code: str) -> list[str]:
    """Return the names of the files of tests that code imports, or imports something from."""
    files_of_tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    imported = []
    for statement in IMPORT.findall(code):
        words = re.findall(r"\w+", statement)
        imported += [word for word in words if word in files_of_tests]
    return imported


def test_no_file_imports_from_a_file_of_tests() -> None:
    """A file of tests tests one thing. What others need of it is in a module of its own."""
    assert imported_files_of_tests("from tests.test_cli import COMMANDS\n") == ["test_cli"]
    assert imported_files_of_tests("from tests import launching, test_cli\n") == ["test_cli"]
    assert imported_files_of_tests("    import tests.test_cli as cli\n") == ["test_cli"]
    assert imported_files_of_tests("from tests import (\n    test_cli,\n)\n") == ["test_cli"]

    found = []
    for folder in ("tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in imported_files_of_tests(path.read_text()):
                found.append(f"{path.relative_to(ROOT)}: {name}.py")
    assert found == []


def collected_tests(variables: dict[str, str]) -> set[str]:
    command = [*PYTHON, "-m", "pytest", "--collect-only", "-p", "no:xdist"]
    output = run(command, variables).assert_ok().out
    return {line for line in output.splitlines() if "::" in line}


@long_form
def test_the_mark_alone_decides_what_a_long_form_is() -> None:
    """``make test-all`` selects the mark. A test that is collected for it only would run nowhere."""
    tests = collected_tests({"LLMTRAIN_LONG": ""})
    assert len(tests) > 1000
    assert collected_tests({"LLMTRAIN_LONG": "1"}) == tests
