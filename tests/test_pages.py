"""README, CONTRIBUTING and docs: their links lead somewhere, their flags exist, and their commands run.

The language of a block is a mark. `make test-all` runs the commands of `bash` blocks and tables with a
small model, and `python` blocks with fewer steps. Of `sh` blocks, and of `$` lines above an output, it
checks the flags only.

docs/guides/inspecting-runs.md shows outputs: LLMTRAIN_WRITE_DOCS=1 writes them, instead of comparing.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import llmtrain as lt
from llmtrain.cli import parse_command
from recipes import distill, finetune, gpt, preference
from tests.buckets import bucket_server
from tests.forked import run_forked
from tests.launching import (
    BIN,
    DISTILL,
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    ROOT,
    WRITE_DOCS,
    Ended,
    long_form,
    read_json,
    run,
    write_chats,
    write_pairs,
    write_text,
)

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages for agents, whose commands run as they are, one after the other.
SKILL = ROOT / "llmtrain" / ".agents" / "skills" / "llmtrain" / "SKILL.md"
AGENT_PAGES = [ROOT / "AGENTS.md", SKILL]
each_page = pytest.mark.parametrize("page", [*PAGES, *AGENT_PAGES], ids=lambda page: page.name)
RECIPES = {
    GPT: gpt,
    FINETUNE: finetune,
    DISTILL: distill,
    PREFERENCE: preference,
    "mine/gpt.py": gpt,
}
PROGRAMS = ("llmtrain", "python", "accelerate", "torchrun", "make")
# Commands that show a mistake, or print and end.
ENDS_EARLY = ("--n_layers 3", "--lr 2e-5", "--help", "--version", "--print_config")

# Parts of the commands and programs that other tests run, and of those that need other programs.
NOT_RUN_HERE = (
    "pip install",
    "single_gpu.yaml",
    "multi_gpu.yaml",
    "fsdp2.yaml",
    "multi_node.yaml",
    "sums.py",
    "def sums()",
    "class Plateau",
    "llmtrain eval",
    "llmtrain export",
    "llmtrain verify layout --layouts 2,4",
    "llmtrain verify resume",
    "--continue_adapter",
    "--config small.yaml",
    "accelerate launch --max_restarts",
    "runs/finetune-lora/model",
    "docs/migrate/",
    "python -m benchmarks",
)
# The flags, by name, that make a command small.
SMALL = {
    "n_layer": "2",
    "n_head": "2",
    "n_embd": "32",
    "block_size": "64",
    "tokenizer": "byte",
    "dataset": "small.txt",
    "max_steps": "10",
    "logging_steps": "2",
    "report_to": "none",
    "global_batch_size": "8",
}
SMALL_FINETUNE = {
    "config_overrides": "hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8",
    "block_size": "128",
    "tokenizer": "byte",
    "dataset": "chats.jsonl",
    "max_steps": "4",
    "report_to": "none",
}
SMALL_BASE = {name: SMALL_FINETUNE[name] for name in ("block_size", "max_steps", "report_to")}
SMALL_ROUNDS = {
    "block_size": "128",
    "prompts_per_round": "8",
    "max_new_tokens": "4",
    "report_to": "none",
}
SMALL_PREFERENCE = {name: SMALL_FINETUNE[name] for name in ("max_steps", "report_to")}
# The commands of README read the built-in data sets, which would take minutes to tokenise in full. Those of other
# pages read files.
FEW_DOCUMENTS = {"max_train_samples": "3000", "eval_fraction": "0.002"}
SMALL_PAIRS = {**SMALL_PREFERENCE, "dataset": "pairs.jsonl"}
SMALL_PLAN = {name: SMALL[name] for name in ("tokenizer", "dataset")}
# A part of a command -> its exit status, if that is not 0.
STATUS = {"--n_layers 3": 2, "llmtrain diff ": 1}
# A part of a command -> the command that makes the run or model that it needs.
MADE_BEFORE = {
    " FOLDER_OR_HUB_NAME --dataset chats.jsonl --report_to none": "python recipes/finetune.py",
    " runs/gpt": "python recipes/gpt.py",
    " runs/gpt-2": "python recipes/gpt.py --seed 1",
}


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    fenced = r"^ *```(\w*)[^\n]*\n(.*?)^ *```"
    found = re.findall(fenced, page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands_in(lines: list[str]) -> list[str]:
    """Return commands, each once, with single spaces and without comments."""
    without_comments = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    with_single_spaces = [" ".join(line.split()) for line in without_comments]
    return [*dict.fromkeys(filter(None, with_single_spaces))]


def lines_of(page: Path, language: str) -> list[str]:
    """Return the lines of the blocks in a language, with continued lines joined."""
    return "".join(blocks(page, language)).replace("\\\n", " ").splitlines()


def commands_to_run(page: Path) -> list[str]:
    """Return the commands in a page's bash blocks and tables."""
    lines = lines_of(page, "bash")
    for row in re.findall(r"^\|.*", page.read_text(), re.MULTILINE):
        lines += re.findall(r"`((?:llmtrain|python|accelerate|torchrun|make) [^`]+)`", row)
    return commands_in(lines)


def commands_marked_as_not_run(page: Path) -> list[str]:
    """Return the commands in a page's sh blocks, and those above an output."""
    outputs = lines_of(page, "")
    shown = [line.removeprefix("$ ") for line in outputs if line.startswith("$ ")]
    return [line for line in commands_in(lines_of(page, "sh") + shown) if line.startswith(PROGRAMS)]


# --- links and flags


@each_page
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)

    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


@each_page
def test_the_flags_of_a_page_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "small.yaml"):
        (tmp_path / name).write_text("n_layer: 1\n")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")

    for command in [*commands_to_run(page), *commands_marked_as_not_run(page)]:
        if any(part in command for part in ENDS_EARLY):
            continue
        # Variables of the shell stand for numbers, and a tracker need not be installed.
        made = re.sub(r"--report_to \w+", "--report_to none", re.sub(r"\$\w+", "1", command))
        words = shlex.split(re.split(r" (?:&&|\||;|&|>|<)(?: |$)", f"{made} ")[0])
        recipes = [word for word in words if word in RECIPES]
        if words and words[0] == "llmtrain":
            parse_command(words[1:])
        elif recipes and words[0] in ("python", "accelerate", "torchrun"):
            flags = words[words.index(recipes[0]) + 1 :]
            lt.parse(RECIPES[recipes[0]].DEFAULTS, flags)


# --- commands


def is_run_here(text: str) -> bool:
    return not text.startswith("vllm ") and not any(part in text for part in NOT_RUN_HERE)


def made_small(command: str, page: Path) -> str:
    """Return a command with the flags that make it small, except those that it already has."""
    reads_builtin = page.name == "README.md"
    flags = small_flags(command, reads_builtin=reads_builtin)
    if reads_builtin and "recipes/" in command:
        flags = {**flags, **FEW_DOCUMENTS}
    missing = [f"--{name} {value}" for name, value in flags.items() if f"--{name} " not in command]

    command = re.sub("FOLDER_OR_HUB_NAME|STUDENT|TEACHER", "runs/finetune/model", command)
    return " ".join([command, *missing])


def small_flags(command: str, *, reads_builtin: bool) -> dict[str, str]:
    """Return the flags, by name, that make a recipe small, except those about its documents.

    Args:
        command: a command of a page.
        reads_builtin: whether the recipes of the page read the built-in data sets.
    """
    if "plan recipes/gpt.py" in command:
        return {} if reads_builtin else SMALL_PLAN

    if "recipes/gpt.py" in command:
        flags = dict(SMALL)
        # The page has chosen the micro-batch for the global batch of the recipe.
        if "--per_device_train_batch_size" in command:
            del flags["global_batch_size"]
        if re.search("--dataset (sets/|s3:)", command):  # which have their tokenizer
            del flags["tokenizer"]
        if "--max_tokens" in command:
            del flags["max_steps"]
        return flags

    if "recipes/finetune.py --model_name_or_path runs/gpt" in command:
        # The small model of gpt.py decides the rest.
        return SMALL_PREFERENCE

    if re.search("recipes/(finetune|distill).py", command):
        has_model = re.search("FOLDER_OR_HUB_NAME|STUDENT", command)
        flags = SMALL_BASE if has_model else SMALL_FINETUNE
        return SMALL_ROUNDS if "--rounds" in command else flags

    if "recipes/preference.py" in command:
        return SMALL_PREFERENCE if reads_builtin else SMALL_PAIRS
    return {}


def programs_and_commands(page: Path, folder: Path) -> list[str]:
    """Return the commands of a page that this test runs, and commands that start its Python blocks.

    The Python blocks are written into the folder.
    """
    to_run = [command for command in commands_to_run(page) if is_run_here(command)]
    programs = [code for code in blocks(page, "python") if is_run_here(code)]
    for number, code in enumerate(programs):
        (folder / f"block{number}.py").write_text(code)
        to_run.append(f"python block{number}.py")
    return to_run


def commands_before(to_run: list[str]) -> list[str]:
    """Return the commands that make the models and runs which other commands need."""
    return [
        command
        for part, command in MADE_BEFORE.items()
        if any(part in later_command for later_command in to_run)
    ]


def write_inputs(folder: Path) -> None:
    """Write the files that the commands of the pages read."""
    for name in ("recipes", "accelerate_configs", "docs"):
        (folder / name).symlink_to(ROOT / name)

    write_text(folder / "small.txt")
    for name in ("corpus", "books"):
        (folder / name / "part").mkdir(parents=True)
        shutil.copy(folder / "small.txt", folder / name / "part" / "one.txt")
        shutil.copy(folder / "small.txt", folder / name / "one.txt")

    write_chats(folder / "chats.jsonl")
    write_pairs(folder / "pairs.jsonl")
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    (folder / "my.yaml").write_text("n_layer: 1\nsave_steps: 4\n")


def as_run(command: str, page: Path) -> str:
    """Return a command as this test runs it: with a small model, and make without its actions."""
    if command.startswith("make "):
        return command.replace("make ", f"make -C {ROOT} -n ", 1)
    return made_small(command, page)


def run_in(folder: Path, command: str) -> Ended:
    """Run a command of a page in a folder, forked if it needs no shell."""
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "offline",
    }
    program, *words = shlex.split(command)
    beginnings = {
        "python": PYTHON,
        "llmtrain": [*PYTHON, str(BIN / "llmtrain")],
        "accelerate": [str(BIN / "accelerate")],
    }
    if program in beginnings and not re.search("[|<>&*]| -[cm] ", command):
        forked_command = [*beginnings[program], *words]
        return run_forked(forked_command, environment, timeout=300, folder=folder)
    return run(["bash", "-ec", f"cd {folder}; {command} < /dev/null"], environment, timeout=300)


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    to_run = programs_and_commands(page, tmp_path)
    storage = contextlib.nullcontext()
    if any("s3://" in command for command in to_run):
        pytest.importorskip("s3fs")
        pytest.importorskip("moto")
        storage = bucket_server()

    with storage:
        for command in dict.fromkeys([*commands_before(to_run), *to_run]):
            small_command = as_run(command, page)
            ended = run_in(tmp_path, small_command)

            expected = next((status for part, status in STATUS.items() if part in command), 0)
            assert ended.status == expected, (
                f"{page.name}: {small_command}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
            )


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", AGENT_PAGES, ids=lambda page: page.name)
def test_an_agent_that_does_what_a_page_says_trains_resumes_and_judges(
    page: Path, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    [settings] = blocks(page, "yaml")
    (tmp_path / "small.yaml").write_text(settings)

    verdicts = []
    for command in commands_in(lines_of(page, "bash")):
        ended = run_in(tmp_path, command)

        expected = 10 if "--verdict" in command else int("llmtrain diff " in command)
        assert ended.status == expected, f"{command}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
        if command.endswith("--json"):
            printed = json.loads(ended.out)
            verdicts += [printed["verdict"]] if "--verdict" in command else []
    assert verdicts == ["worse"]
    if page.name == "AGENTS.md":
        starts = read_json(tmp_path / "runs" / "try" / "run.json")["starts"]
        assert len(starts) == 2
        assert starts[1]["step"] > 0, "the killed run was resumed"


# --- a page that shows outputs

INSPECTING_RUNS = ROOT / "docs" / "guides" / "inspecting-runs.md"
HOME = "/home/me"  # on the page


def labels(output: str) -> list[list[str]]:
    """Return the first two words of each line. The rest differs between machines."""
    return [re.findall("[a-z]+", line)[:2] for line in output.splitlines()]


@long_form
def test_the_page_about_runs_shows_what_its_commands_print(tmp_path: Path) -> None:
    page = INSPECTING_RUNS.read_text()
    write_inputs(tmp_path)
    [settings] = blocks(INSPECTING_RUNS, "yaml")
    (tmp_path / "small.yaml").write_text(settings)
    for command in lines_of(INSPECTING_RUNS, "bash"):
        run_in(tmp_path, command).assert_ok()

    for block, command, shown in re.findall(r"(```\n\$ (.*)\n((?:.*\n)*?)```\n)", page):
        ended = run_in(tmp_path, command)
        assert ended.status == (1 if " diff " in command else 0), ended.err
        if WRITE_DOCS:
            printed = ended.out.replace(str(tmp_path), HOME)
            text = INSPECTING_RUNS.read_text()
            INSPECTING_RUNS.write_text(text.replace(block, f"```\n$ {command}\n{printed}```\n"))
        else:
            assert labels(ended.out) == labels(shown)
