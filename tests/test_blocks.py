"""`make test-all` runs every command of README and docs with a small model, and their Python as it stands: all but what
another test runs, and what is of tools that are not here."""

import ast
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT, long_form, run, write_chats, write_pairs, write_text

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALL = {
    **{
        "n_layer": "2",
        "n_head": "2",
        "n_embd": "32",
        "block_size": "64",
        "tokenizer": "byte",
        "dataset": "small.txt",
    },
    **{"max_steps": "10", "logging_steps": "2", "report_to": "none", "global_batch_size": "8"},
}
SMALL_FINETUNE = {
    "config_overrides": "hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8",
    **{
        "block_size": "128",
        "tokenizer": "byte",
        "dataset": "chats.jsonl",
        "max_steps": "4",
        "report_to": "none",
    },
}
SMALL_BASE = {name: SMALL_FINETUNE[name] for name in ("block_size", "max_steps", "report_to")}
SMALL_PREFERENCE = {name: SMALL_FINETUNE[name] for name in ("max_steps", "report_to")}
ELSEWHERE = {  # a part of a command -> the test that runs it, and how it stands there
    "pip install": ("system/test_install.py", '"--editable"'),
    "single_gpu.yaml": ("system/test_launch.py", '"single_gpu"'),
    "multi_gpu.yaml": ("system/test_launch.py", '"multi_gpu"'),
    "fsdp2.yaml": ("system/test_sharding.py", 'accelerate("fsdp2"'),
    "fsdp2_tp.yaml": ("system/test_sharding.py", 'accelerate("fsdp2_tp"'),
    "tensor_parallel.yaml": ("system/test_sharding.py", 'accelerate("tensor_parallel"'),
    "multi_node.yaml": ("system/test_two_machines.py", '"multi_node"'),
    "sums.py": ("system/test_own_recipe.py", '"sums.py"'),
    "llmtrain eval": ("system/test_scores.py", '"eval"'),
    "llmtrain export": ("system/test_finetune.py", '"export"'),
    "llmtrain verify layout --layouts 2,4": ("system/test_verify.py", '"2,4,8"'),
    "llmtrain verify resume": ("system/test_verify.py", '"resume", "--steps"'),
    "--config small.yaml": ("test_pages.py", '"small.yaml"'),
    "accelerate launch --max_restarts": ("system/test_faults.py", '"--max_restarts"'),
    "def sums()": ("system/test_own_recipe.py", "own-recipe.md"),
    "docs/migrate/1_plain.py": ("system/test_migrate.py", '"1_plain"'),
    "docs/migrate/2_ddp.py": ("system/test_migrate.py", '"2_ddp"'),
    "docs/migrate/3_accelerate.py": ("system/test_migrate.py", '"3_accelerate"'),
    "docs/migrate/4_llmtrain.py": ("system/test_migrate.py", '"4_llmtrain"'),
}
NOT_HERE = ("vllm ", "python llama.cpp/", "python -m benchmarks.gpu")  # the last needs nanoGPT
STATUS = {"--n_layers 3": 2, "llmtrain diff ": 1}  # of those that are to end with another than 0
MADE_BEFORE = {
    " FOLDER_OR_HUB_NAME --dataset chats.jsonl --report_to none": "python recipes/finetune.py",
    " runs/gpt": "python recipes/gpt.py",
    " runs/gpt-2": "python recipes/gpt.py --seed 1",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[str]:
    """Of a page's bash blocks and tables, without remarks; a command that stands there twice once."""
    lines = [
        line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    for row in re.findall(r"^\|.*", page.read_text(), re.MULTILINE):
        lines += re.findall(r"`((?:llmtrain|python|accelerate|torchrun|make) [^`]+)`", row)
    found = [" ".join(re.sub(r"(^|\s)#.*", "", line).split()) for line in lines]
    return [*dict.fromkeys(filter(None, found))]


def made_small(command: str) -> str:
    """With flags that the command itself leaves open."""
    flags: dict[str, str] = {}
    if "recipes/gpt.py" in command and " plan " not in command:
        flags = dict(SMALL)
        if (
            "--per_device_train_batch_size" in command
        ):  # which is chosen for the batch that the recipe has
            del flags["global_batch_size"]
    elif "recipes/finetune.py --model_name_or_path runs/gpt" in command:
        flags = SMALL_PREFERENCE  # the small model of gpt.py decides the rest
    elif "recipes/finetune.py" in command:
        flags = SMALL_BASE if "FOLDER_OR_HUB_NAME" in command else SMALL_FINETUNE
    elif "recipes/preference.py" in command:
        flags = SMALL_PREFERENCE
    command = command.replace("FOLDER_OR_HUB_NAME", "runs/finetune/model")
    more = [f"--{name} {value}" for name, value in flags.items() if f"--{name} " not in command]
    return " ".join([command, *more])


@pytest.mark.parametrize("part", ELSEWHERE)
def test_what_is_said_to_run_elsewhere_stands_on_a_page_and_in_that_test(part: str) -> None:
    test, words = ELSEWHERE[part]
    assert any(part in one for page in PAGES for one in [*commands(page), *blocks(page, "python")])
    assert is_in_code_of_a_test(words, ROOT / "tests" / test)


def is_in_code_of_a_test(words: str, path: Path) -> bool:
    """Return whether an expression in a file of tests holds these words.

    A remark or a docstring that mentions a command does not run it.
    """
    wanted = set(re.findall(r'"([^"]+)"', words)) or {words}
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    assert any(isinstance(node, ast.FunctionDef) and "test_" in node.name for node in nodes), path
    expressions = (ast.Call, ast.List, ast.Tuple, ast.Dict, ast.BinOp, ast.Assign, ast.arguments)
    for node in nodes:
        if isinstance(node, expressions):
            constants = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
            if wanted <= {str(constant.value) for constant in constants}:
                return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(
        r"\]\(([^)#]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    )
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_readme_counts_the_lines_of_configs() -> None:
    lines = [path.read_text().count("\n") for path in (ROOT / "accelerate_configs").glob("*.yaml")]
    assert f"Each config is {min(lines)} to {max(lines)} lines" in (ROOT / "README.md").read_text()


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    here = [command for command in commands(page) if not any(part in command for part in ELSEWHERE)]
    here = [command for command in here if not command.startswith(NOT_HERE)]
    made = [
        command for part, command in MADE_BEFORE.items() if any(part in command for command in here)
    ]
    written = [
        code for code in blocks(page, "python") if not any(part in code for part in ELSEWHERE)
    ]
    for number, code in enumerate(written):
        (tmp_path / f"block{number}.py").write_text(code)
        here.append(f"python block{number}.py")
    for name in ("recipes", "accelerate_configs", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_text(tmp_path / "small.txt")
    for name in ("corpus", "books"):
        (tmp_path / name / "part").mkdir(parents=True)
        shutil.copy(tmp_path / "small.txt", tmp_path / name / "part" / "one.txt")
        shutil.copy(tmp_path / "small.txt", tmp_path / name / "one.txt")
    write_chats(tmp_path / "chats.jsonl")
    write_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "my.yaml").write_text("n_layer: 1\nsave_steps: 4\n")
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "offline",
    }
    for command in [*made, *here]:
        known = command.startswith("make ")  # to make; the targets are what runs all else
        words = command.replace("make ", f"make -C {ROOT} -n ", 1) if known else made_small(command)
        ended = run(
            ["bash", "-ec", f"cd {tmp_path}; {words} < /dev/null"], environment, timeout=300
        )
        expected = next((status for part, status in STATUS.items() if part in command), 0)
        assert ended.status == expected, (
            f"{page.name}: {words}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
        )
