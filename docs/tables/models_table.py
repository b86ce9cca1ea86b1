"""Make docs/explanation/models-table.md, and the verdicts that packing is decided by.

Run it with the transformers version that the table is for, from the root of the repository, and
commit what it writes. The table takes about two minutes, and all classes some more:

    python -m docs.tables.models_table
    python -m docs.tables.models_table --all-classes

A small model of each family, with random weights, is tried as a run tries the model that it trains.
Classes that cannot be tried are printed. They are not on the list of verdicts, so rows are not
packed for them.
"""

import argparse
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Set
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import cast

import transformers

from docs.tables.model_trials import Trial, try_family
from docs.tables.packing_trials import (
    ORDER,
    UntriedError,
    Verdict,
    types_of_classes,
    verdict_on_types,
)
from llmtrain.models.model_classes import VERDICTS
from tests.forked import IMPORTED, run_forked
from tests.launching import ROOT, accelerate

PAGE = ROOT / "docs" / "explanation" / "models-table.md"

# The columns of the tables on the page. The first line of a table finds it again.
TABLES = (
    ("family", "trains", "packs", "prompts shared", "FSDP2", "reloads", "reward"),
    ("family", "class", "LoRA", "not reached", "templates"),
)

# The families of the table, and which of the templates in templates-table.md theirs are.
FAMILIES = {
    "apertus": "",
    "arcee": "",
    "bamba": "",
    "bloom": "",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "deepseek_v2": "",
    "deepseek_v3": "deepseekv3",
    "ernie4_5": "",
    "exaone4": "",
    "falcon": "",
    "falcon_h1": "",
    "falcon_mamba": "",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4, gemma4_v2, gemma4_v3, gemma4_v4, gemma4_v5",
    "glm": "",
    "glm4": "",
    "glm4_moe": "glm4moe",
    "gpt2": "",
    "gpt_neox": "",
    "gpt_oss": "gptoss",
    "granite": "",
    "granitemoehybrid": "",
    "hunyuan_v1_dense": "",
    "jamba": "",
    "kimi_linear": "",
    "lfm2": "lfm2, lfm2_v2, lfm2_2_5, lfm2_2_5_v2",
    "llama": "llama3, llama3_1, llama3_2, deepseek_r1_distill",
    "llama4": "",
    "mamba": "",
    "mamba2": "",
    "minimax": "",
    "ministral3": "",
    "mistral": "",
    "mistral3": "",
    "mixtral": "",
    "mpt": "",
    "nemotron": "",
    "nemotron_h": "nemotron_3_nano, nemotron_3_super, nemotron_3_ultra",
    "olmo": "",
    "olmo2": "",
    "olmo3": "",
    "olmoe": "",
    "opt": "",
    "phi": "",
    "phi3": "phi3, phi3_5",
    "qwen2": "qwen2_5, deepseek_r1_distill",
    "qwen3": "qwen3, qwen3_instruct_2507",
    "qwen3_5": "qwen3_5_think, qwen3_5_nothink, qwen3_6",
    "qwen3_5_moe": "qwen3_5_think, qwen3_6",
    "qwen3_moe": "qwen3, qwen3_instruct_2507",
    "qwen3_next": "",
    "qwen3_vl": "",
    "rwkv": "",
    "seed_oss": "",
    "smollm3": "",
    "stablelm": "",
    "starcoder2": "",
    "zamba2": "",
}


def try_families(families: list[str]) -> dict[str, Trial]:
    """Try some families in one process each, and then all of them on two ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folders = [folder / family for family in families]
        with _processes() as pool:
            trials = dict(zip(families, pool.map(try_family, families, folders), strict=True))

        steps = {family: trial.step for family, trial in trials.items() if trial.step}
        (folder / "steps.json").write_text(json.dumps(steps))
        launcher = accelerate("fsdp2")
        command = [*launcher, "docs/tables/sharded_families.py", name]
        run_forked(command, timeout=600).assert_ok()
        sharded = json.loads((folder / "sharded.json").read_text())

    for family, trial in trials.items():
        trial.cells["family"] = family
        trial.cells["FSDP2"] = sharded.get(family, "-")
        trial.cells["templates"] = FAMILIES[family] or "-"
    return trials


def _processes() -> ProcessPoolExecutor:
    """Return two processes that have imported the modules of a trial."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, try_family.__module__])
    return ProcessPoolExecutor(max_workers=2, mp_context=context)


def lines_of(trial: Trial) -> list[str]:
    """Return a family's line in each of the tables."""
    return [_line([trial.cells.get(column, "-") for column in columns]) for columns in TABLES]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rows_of(page: str, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return the rows of a table of the page, by column."""
    _, _, table = page.partition(f"{_line([*columns])}\n")
    rows = []
    for line in table.splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def _with_rows(page: str, trials: dict[str, Trial]) -> str:
    """Return the page with other rows in its tables."""
    version = f"transformers {transformers.__version__}"
    page = re.sub(r"transformers \d[\w.]*", version, page)
    for number, columns in enumerate(TABLES):
        head = _line([*columns])
        rows = [lines_of(trials[family])[number] for family in FAMILIES]
        table = "\n".join([head, "|---" * len(columns) + "|", *rows])
        page = re.sub(rf"{re.escape(head)}\n(\|.*\n)+", lambda _, table=table: f"{table}\n", page)
    return page


def _verdict(class_name: str) -> Verdict | str:
    """Return the verdict on a class, or why it was not tried."""
    try:
        return verdict_on_types(types_of_classes()[class_name])
    except UntriedError as error:
        return str(error)


def _verdicts_on(class_names: Set[str]) -> dict[str, Verdict]:
    """Return the verdicts on classes, and print those that cannot be tried."""
    verdicts: dict[str, Verdict] = {}
    with _processes() as pool:
        for class_name, verdict in zip(class_names, pool.map(_verdict, class_names), strict=True):
            if verdict in ORDER:
                verdicts[class_name] = cast(Verdict, verdict)
            else:
                print(class_name, "was not tried:", verdict)
    return verdicts


def main() -> None:
    """Write the page, and the verdicts on its classes or on all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all-classes", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

    trials = try_families([*FAMILIES])
    PAGE.write_text(_with_rows(PAGE.read_text(), trials))
    verdicts = {trial.cells["class"]: trial.packing.verdict for trial in trials.values()}

    other_classes = types_of_classes().keys() - verdicts.keys()
    if arguments.all_classes:
        verdicts |= _verdicts_on(other_classes)
    else:
        listed = json.loads(VERDICTS.read_text(encoding="utf-8"))["classes"]
        verdicts |= {name: listed[name] for name in listed.keys() & other_classes}

    result = {"transformers": transformers.__version__, "classes": dict(sorted(verdicts.items()))}
    VERDICTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
