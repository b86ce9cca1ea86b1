"""`make test-all` runs every command of README and docs with a small model, and their Python as it stands: all but what
another test runs, and what is of tools that are not here."""

import ast
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import llmtrain as lt
from llmtrain.cli import build_parser
from tests.launching import BIN, ROOT, long_form, run, write_chats, write_pairs, write_text
from tests.tutorials import JOURNEYS, RECIPES

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
SMALL_PREFERENCE = {name: SMALL_FINETUNE[name] for name in ("max_steps", "report_to")}
# The commands of README read the built-in data sets, which would take minutes to tokenise in full. Those of other
# pages read files.
FEW_DOCUMENTS = {"max_train_samples": "3000", "eval_fraction": "0.002"}
SMALL_PAIRS = {**SMALL_PREFERENCE, "dataset": "pairs.jsonl"}
SMALL_PLAN = {name: SMALL[name] for name in ("tokenizer", "dataset")}
# A part of a command -> the test that runs it, and the words of the command in that test.
ELSEWHERE = {
    "pip install": ("system/test_install.py", '"--editable"'),
    "single_gpu.yaml": ("system/test_launch.py", '"single_gpu"'),
    "multi_gpu.yaml": ("system/test_launch.py", '"multi_gpu"'),
    "fsdp2.yaml": ("system/test_sharding.py", 'accelerate("fsdp2"'),
    "multi_node.yaml": ("system/test_two_machines.py", '"multi_node"'),
    "sums.py": ("system/test_own_recipe.py", '"sums.py"'),
    "llmtrain eval": ("system/test_eval.py", '"eval", "--dataset"'),
    "llmtrain export": ("system/test_finetune.py", '"export"'),
    "llmtrain verify layout --layouts 2,4": ("system/test_verify.py", '"1,4"'),
    "llmtrain verify resume": ("system/test_verify.py", '"resume", "--steps"'),
    "--continue_adapter": ("system/test_adapters.py", '"--continue_adapter"'),
    "--config small.yaml": ("test_pages.py", '"small.yaml"'),
    "accelerate launch --max_restarts": ("system/test_faults.py", '"--max_restarts"'),
    "def sums()": ("system/test_own_recipe.py", "own-recipe.md"),
    "class Plateau": ("system/test_own_callbacks.py", "callbacks.md"),
    "docs/migrate/1_plain.py": ("system/test_migrate.py", '"1_plain"'),
    "docs/migrate/2_ddp.py": ("system/test_migrate.py", '"2_ddp"'),
    "docs/migrate/3_accelerate.py": ("system/test_migrate.py", '"3_accelerate"'),
    "docs/migrate/4_llmtrain.py": ("system/test_migrate.py", '"4_llmtrain"'),
    "docs/migrate/trl_own.py": ("system/test_from_trl.py", '"trl_runs.py"'),
    "runs/finetune-lora/model": ("system/test_hand_over.py", '"runs/finetune-lora/model"'),
    "docs/migrate/trl_grpo.py": ("system/test_hand_over.py", '"trl_grpo.py"'),
    "docs/migrate/llmtrain_own.py": ("system/test_from_trl.py", '"llmtrain_own.py"'),
}
# Beginnings of commands of other programs. The last one needs nanoGPT.
NOT_HERE = ("vllm ", "python llama.cpp/", "python -m benchmarks.gpu")
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
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the commands in a page's bash blocks and tables, each once and without comments."""
    lines = []
    for block in blocks(page, "bash"):
        lines += block.replace("\\\n", " ").splitlines()
    for row in re.findall(r"^\|.*", page.read_text(), re.MULTILINE):
        lines += re.findall(r"`((?:llmtrain|python|accelerate|torchrun|make) [^`]+)`", row)

    without_comments = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    with_single_spaces = [" ".join(line.split()) for line in without_comments]
    return [*dict.fromkeys(filter(None, with_single_spaces))]


def made_small(command: str, page: Path) -> str:
    """Return a command with the flags that make it small, except those that it already has."""
    reads_builtin = page.name == "README.md"
    flags = small_flags(command, reads_builtin=reads_builtin)
    if reads_builtin and "recipes/" in command:
        flags = {**flags, **FEW_DOCUMENTS}
    missing = [f"--{name} {value}" for name, value in flags.items() if f"--{name} " not in command]

    command = command.replace("FOLDER_OR_HUB_NAME", "runs/finetune/model")
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
        return flags

    if "recipes/finetune.py --model_name_or_path runs/gpt" in command:
        # The small model of gpt.py decides the rest.
        return SMALL_PREFERENCE

    if "recipes/finetune.py" in command:
        return SMALL_BASE if "FOLDER_OR_HUB_NAME" in command else SMALL_FINETUNE

    if "recipes/preference.py" in command:
        return SMALL_PREFERENCE if reads_builtin else SMALL_PAIRS
    return {}


@pytest.mark.parametrize("part", ELSEWHERE)
def test_what_is_said_to_run_elsewhere_stands_on_a_page_and_in_that_test(part: str) -> None:
    test, words = ELSEWHERE[part]
    texts = []
    for page in PAGES:
        texts += [*commands(page), *blocks(page, "python")]

    assert any(part in text for text in texts)
    assert is_in_code_of_a_test(words, ROOT / "tests" / test)


# Expressions that can be a command, or a part of one.
EXPRESSIONS = (ast.Call, ast.List, ast.Tuple, ast.Dict, ast.BinOp, ast.Assign, ast.arguments)


def is_in_code_of_a_test(words: str, path: Path) -> bool:
    """Return whether an expression in a file of tests holds these words.

    A comment or a docstring that mentions a command does not run it.

    Args:
        words: the words of a command. If some are quoted, each must be there as a word or a part of
            a longer string, such as a command that stands in one string.
        path: the file of tests.
    """
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    assert any(isinstance(node, ast.FunctionDef) and "test_" in node.name for node in nodes), path

    required = set(re.findall(r'"([^"]+)"', words)) or {words}
    expressions = [node for node in nodes if isinstance(node, EXPRESSIONS)]
    return any(required_words_are_in(strings_in(node), required) for node in expressions)


def strings_in(expression: ast.AST) -> list[str]:
    """Return the constants in an expression, with single spaces between their words."""
    constants = [node for node in ast.walk(expression) if isinstance(node, ast.Constant)]
    return [" ".join(str(constant.value).split()) for constant in constants]


def required_words_are_in(strings: list[str], required: set[str]) -> bool:
    """Return whether each of the required words is in one of the strings, as whole words."""
    padded = [f" {string} " for string in strings]
    return all(any(f" {words} " in string for string in padded) for words in required)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)

    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_readme_counts_the_lines_of_configs() -> None:
    lines = [path.read_text().count("\n") for path in (ROOT / "accelerate_configs").glob("*.yaml")]
    assert f"Each config is {min(lines)} to {max(lines)} lines" in (ROOT / "README.md").read_text()


def is_run_elsewhere(text: str) -> bool:
    """Return whether another test runs a command, or a block of Python."""
    return any(part in text for part in ELSEWHERE)


def programs_and_commands(page: Path, folder: Path) -> list[str]:
    """Return the commands of a page that this test runs, and commands that start its Python blocks.

    The Python blocks are written into the folder.
    """
    to_run = []
    for command in commands(page):
        if not is_run_elsewhere(command) and not command.startswith(NOT_HERE):
            to_run.append(command)

    programs = [code for code in blocks(page, "python") if not is_run_elsewhere(code)]
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


def expected_status(command: str) -> int:
    return next((status for part, status in STATUS.items() if part in command), 0)


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    to_run = programs_and_commands(page, tmp_path)
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "offline",
    }

    for command in dict.fromkeys([*commands_before(to_run), *to_run]):
        small_command = as_run(command, page)
        in_folder = f"cd {tmp_path}; {small_command} < /dev/null"

        result = run(["bash", "-ec", in_folder], environment, timeout=300)

        assert result.status == expected_status(command), (
            f"{page.name}: {small_command}\n{result.out[-2000:]}\n{result.err[-2000:]}"
        )


# --- commands that no test runs as they stand

PROGRAMS = ("llmtrain", "python", "accelerate", "torchrun", "make")
# Commands that show a mistake, or print and end.
ENDS_EARLY = ("--n_layers 3", "--lr 2e-5", "--help", "--version", "--print_config")
# Tutorials whose sh blocks test_tutorials.py runs.
RUN_AS_THEY_STAND = {name for names in JOURNEYS.values() for name in names}
# Pages whose `$` lines are run by the test of the page.
RUN_WITH_OUTPUT = {"inspecting-runs.md": "test_pages.py", "ddp.md": "test_lessons.py"}
# Page -> why its commands in sh blocks, and those above an output, are not run; and the commands.
NOT_RUN: dict[str, tuple[str, list[str]]] = {
    "README.md": (
        "the same commands, with a base of the test, are in test_finetune.py and test_chatting.py",
        [
            "accelerate launch recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16",
            "llmtrain chat runs/finetune",
        ],
    ),
    "fsdp.md": (
        "several machines, as in test_two_machines.py",
        [
            "accelerate launch --config_file accelerate_configs/hsdp.yaml --machine_rank 0 --main_process_ip 10.231.0.1 recipes/gpt.py",
            "accelerate launch --config_file accelerate_configs/hsdp.yaml --machine_rank 1 --main_process_ip 10.231.0.1 recipes/gpt.py",
        ],
    ),
    "planning.md": (
        "large models, as in test_plan.py",
        [
            'llmtrain plan recipes/finetune.py --from_config llama --tokenizer byte --config_overrides "hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,intermediate_size=14336,vocab_size=128256" --global_batch_size 128 --max_length 4096 --max_steps 1000 --processes 8 --device h100-80gb --gradient_checkpointing --sync_each_batch',
            'llmtrain plan recipes/finetune.py --from_config llama --tokenizer byte --config_overrides "hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,intermediate_size=14336,vocab_size=128256" --global_batch_size 128 --max_length 4096 --max_steps 1000 --device h100-80gb --fit 80gb',
            "llmtrain plan recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --processes 8 --device h100-80gb",
            "llmtrain plan recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16 --device h100-80gb",
        ],
    ),
    "ready-configs.md": (
        "models of the hub, as in test_ready_configs.py with tiny ones",
        [
            "accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/finetune.py --config recipes/configs/qwen3-0.6b-lora.yaml",
            "accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/finetune.py --config recipes/configs/qwen3-0.6b-lora.yaml --dataset chats.jsonl --max_train_samples 1000",
        ],
    ),
    "sweeps.md": (
        "two long runs, as in inspecting-runs.md",
        [
            "python recipes/gpt.py --learning_rate $rate --output_dir runs/sweep/rate-$rate",
            "llmtrain runs runs/sweep --sort eval_loss",
        ],
    ),
    "reliability.md": (
        "a run that was killed, as in test_kills.py",
        [
            "accelerate launch --config_file accelerate_configs/cpu_ddp.yaml recipes/gpt.py --output_dir runs/moved",
        ],
    ),
    "batch-size.md": (
        "the runs above it are long; test_diff.py compares others",
        [
            "llmtrain diff runs/b8 runs/b32",
        ],
    ),
    "clouds.md": (
        "a part of a sentence: the recipes as modules, which test_install.py starts",
        [
            "python -m llmtrain.recipes.finetune",
            "accelerate launch -m llmtrain.recipes.finetune",
        ],
    ),
    "compare-seeds.md": (
        "many runs; test_repeat.py and test_compare.py make short ones",
        [
            "llmtrain repeat 5 recipes/gpt.py --config small.yaml",
            "llmtrain repeat 5 recipes/gpt.py --config small.yaml --weight_decay 0.2 --output_dir runs/decay",
            "llmtrain compare runs/gpt-seed-* runs/decay-seed-*",
            "llmtrain repeat 8 recipes/gpt.py --config small.yaml",
            "llmtrain repeat 8 recipes/gpt.py --config small.yaml --weight_decay 0.2 --output_dir runs/decay",
            "llmtrain report runs/gpt-seed-* runs/slow-seed-* --output both.html",
        ],
    ),
    "data.md": (
        "data of the reader; test_readers.py, test_columns.py and test_sources.py read such",
        [
            "python recipes/finetune.py --dataset qa.jsonl --columns prompt=question completion=answer",
            "python recipes/finetune.py --dataset qa.jsonl trivia.csv --columns prompt=question completion=answer trivia.csv:completion=solution",
            "python recipes/finetune.py --dataset train.jsonl --eval_dataset val.jsonl hard.jsonl",
            "python recipes/finetune.py --dataset NAME --dataset_train_split train_sft --dataset_test_split test_sft",
        ],
    ),
    "debugging-hangs.md": (
        "a hang, as in test_faults.py",
        [
            "llmtrain runs --finished runs/hang",
            "accelerate launch --config_file accelerate_configs/multi_gpu.yaml recipes/gpt.py --ddp_timeout 120",
        ],
    ),
    "export.md": (
        "another program, and an upload, which test_publish.py makes to a stand-in",
        [
            "python -m sglang.launch_server --model-path runs/finetune/model",
            "python llama.cpp/convert_hf_to_gguf.py runs/finetune/model --outfile model.gguf",
            "accelerate launch recipes/finetune.py --dataset chats.jsonl --push_to_hub NAME/MODEL",
        ],
    ),
    "faq.md": (
        "an error message, as in test_unknown_names.py",
        [
            "python recipes/finetune.py --lr 2e-5 --bf16",
        ],
    ),
    "fine-tuning.md": (
        "4-bit weights need a GPU",
        [
            "accelerate launch recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16 --load_in_4bit",
        ],
    ),
    "hand-over.md": (
        "what TRL has trained, as in test_hand_over.py",
        [
            'llmtrain generate runs/grpo --prompt "def" --max_new_tokens 20',
            "llmtrain eval runs/grpo --dataset chats.jsonl",
            "python recipes/preference.py --model_name_or_path runs/grpo --dataset pairs.jsonl --output_dir runs/dpo",
            "llmtrain export runs/finetune-lora --merge --check --to merged",
            "python docs/migrate/trl_grpo.py --model merged --output_dir runs/grpo",
        ],
    ),
    "inspecting-runs.md": (
        "several runs in a loop, as in test_runs.py",
        [
            "python recipes/gpt.py --learning_rate $rate --seed $seed --output_dir runs/sweep/rate-$rate-seed-$seed",
            "llmtrain runs runs/sweep --sort eval_loss",
            "llmtrain report runs/sweep/* --output sweep.html",
            "llmtrain runs --finished runs/one && ./evaluate.sh",
        ],
    ),
    "machines.md": (
        "several machines, as in test_two_machines.py",
        [
            "accelerate launch --config_file accelerate_configs/multi_node.yaml --machine_rank 0 --main_process_ip 10.231.0.1 recipes/gpt.py",
            "accelerate launch --config_file accelerate_configs/multi_node.yaml --machine_rank 1 --main_process_ip 10.231.0.1 recipes/gpt.py",
            "llmtrain doctor --num_machines 2 --machine_rank 0 --main_process_ip 10.231.0.1",
        ],
    ),
    "memory-table.md": (
        "a model of the reader, as in test_plan.py",
        [
            "llmtrain plan recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16 --device rtx4090-24gb --fit 24gb",
        ],
    ),
    "metric.md": (
        "scripts of the reader; test_own_recipe.py runs the code of the page",
        [
            "python accuracy.py --dataset chats.jsonl --max_steps 20 --eval_steps 20 --report_to none",
            "python accuracy.py --dataset chats.jsonl --load_best_model_at_end --metric_for_best_model eval/accuracy",
            'python accuracy.py --dataset chats.jsonl --sample_prompts "What is the capital of France?"',
        ],
    ),
    "callbacks.md": (
        "a script of the reader; test_own_callbacks.py runs the code of the page",
        [
            "python plateau.py --dataset chats.jsonl --max_steps 20 --eval_steps 10 --report_to none",
        ],
    ),
    "optimizers.md": (
        "a script of the reader; test_own_optimizer.py runs the code of the page",
        [
            "python three_rates.py --report_to none",
        ],
    ),
    "report.md": (
        "runs of another page, as in test_report.py",
        [
            "llmtrain report runs/gpt-seed-* runs/slow-seed-* --output both.html",
        ],
    ),
    "trackers.md": (
        "needs the tracker's package, as in test_trackers.py",
        [
            "python recipes/gpt.py --report_to mlflow",
            "python recipes/gpt.py --report_to trackio --output_dir runs/gpt",
        ],
    ),
    "many-gpus.md": (
        "several machines or GPUs, as in test_two_machines.py and test_launch.py",
        [
            "llmtrain diff runs/one runs/two",
            "accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/gpt.py",
            "torchrun --standalone --nproc-per-node 3 recipes/gpt.py --config my.yaml",
            "accelerate launch --config_file accelerate_configs/multi_node.yaml --machine_rank 0 --main_process_ip 10.231.0.1 recipes/gpt.py --config my.yaml --output_dir runs/machines",
        ],
    ),
    "own-flags.md": (
        "scripts of the reader; test_own_flags.py runs the code of the page",
        [
            "python zloss.py --help",
            "python zloss.py --zloss 0.1",
            "python zloss.py --z_loss -1",
            "python zloss.py --report_to none --output_dir runs/a",
            "python zloss.py --report_to none --output_dir runs/b --z_loss 0.1",
            "llmtrain diff runs/a runs/b",
        ],
    ),
    "own-recipe.md": (
        "scripts of the reader; test_own_recipe.py runs the code of the page",
        [
            "python smoothed.py --report_to none --output_dir runs/smoothed",
            "python zloss.py --max_steps 5 --report_to none",
            "python offsets.py --report_to none --output_dir runs/offsets",
            "accelerate launch --config_file accelerate_configs/fsdp2.yaml --mixed_precision no sharded.py --report_to none --max_steps 20",
        ],
    ),
    "survive-failure.md": (
        "kills, signals and a full disk, as in test_kills.py, test_faults.py and test_crashes.py",
        [
            "python recipes/gpt.py --config my.yaml --output_dir runs/killed &",
            "llmtrain runs",
            "llmtrain diff runs/straight runs/killed",
            "python recipes/gpt.py --config my.yaml --output_dir runs/preempted &",
            "llmtrain runs --finished runs/preempted",
            "llmtrain diff runs/straight runs/preempted",
            "python recipes/gpt.py --config my.yaml --output_dir disk/full &",
            "llmtrain runs check disk/full",
            "python recipes/gpt.py --config my.yaml --output_dir disk/full",
            "llmtrain runs check runs/hours",
        ],
    ),
}


def commands_not_run(page: Path) -> list[str]:
    """The commands of a page that neither this module nor a test of the page runs as they stand."""
    found = []
    for language, text in re.findall(
        r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        is_run = language == "sh" and page.name in RUN_AS_THEY_STAND
        if is_run or language not in ("sh", ""):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            if language == "" and (not line.startswith("$ ") or page.name in RUN_WITH_OUTPUT):
                continue
            command = " ".join(re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).split())
            if command.startswith(PROGRAMS):
                found.append(command)
    run_here = set(commands(page))
    return [command for command in dict.fromkeys(found) if command not in run_here]


def test_every_command_is_run_or_listed_with_the_reason() -> None:
    found = {page.name: commands_not_run(page) for page in PAGES}
    listed = {page: words for page, (_, words) in NOT_RUN.items()}
    assert {page: words for page, words in found.items() if words} == listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_has_flags_that_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "small.yaml"):
        (tmp_path / name).write_text("n_layer: 1\n")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for command in [*commands(page), *commands_not_run(page)]:
        if any(part in command for part in ENDS_EARLY):
            continue
        # Variables of the shell stand for numbers, and a tracker need not be installed.
        made = re.sub(r"--report_to \w+", "--report_to none", re.sub(r"\$\w+", "1", command))
        words = shlex.split(re.split(r" (?:&&|\||;|&|>|<)(?: |$)", f"{made} ")[0])
        recipes = [word for word in words if word in RECIPES]
        if words and words[0] == "llmtrain":
            build_parser().parse_args(words[1:])
        elif recipes and words[0] in ("python", "accelerate", "torchrun"):
            flags = words[words.index(recipes[0]) + 1 :]
            lt.parse(RECIPES[recipes[0]].DEFAULTS, flags)
