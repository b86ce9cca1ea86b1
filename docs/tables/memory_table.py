"""Make the tables of docs/explanation/memory-table.md, from the root of the repository:

    python -m docs.tables.memory_table

It takes less than two minutes. The memory model of `llmtrain plan` computes every cell, from
configurations that are written here. No weights are read.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from llmtrain.cli import main as llmtrain
from llmtrain.devices import RESERVED_MEMORY, USUAL_MFU, size_bytes
from llmtrain.lab.plan.hardware import PlanRequest, hardware_of
from llmtrain.lab.plan.speed import estimate_compute, step_time
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.predicted_memory import Memory
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.recomputation import least_recomputation
from tests.launching import FINETUNE, ROOT, write_chats

PAGE = ROOT / "docs" / "explanation" / "memory-table.md"
ONE_PROCESS = Sharding(replicas=1, shards=1)
ROWS = 8
TOKENS = 1024

# The sizes in https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, and of its smaller
# siblings.
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
}
MODELS = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        **_QWEN3,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
# The models of benchmarks/gpu/llama.py, which docs/explanation/performance.md has figures of.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": TOKENS + 1,
    "tie_word_embeddings": False,
}
MEASURED_MODELS = {
    "Llama 1.4B": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "Llama 8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
}

# The sizes that --fit takes, and the card of each.
CARDS = {
    "24gb": "rtx4090-24gb",
    "48gb": "l40s-48gb",
    "80gb": "h100-80gb",
    "141gb": "h200-141gb",
}
FIT_SIZES = ("24gb", "48gb", "80gb")
HEAD = ("method", "24 GB", "48 GB", "80 GB", "141 GB")
MEASURED_HEAD = (
    "model",
    "method",
    "recomputation",
    "measured",
    "planned",
    "difference",
    "measured tokens/s",
    "planned",
)


class Method(NamedTuple):
    """A way to train, and the flags that are planned for it."""

    optim: str = "adamw"
    has_bf16_weights: bool = False
    is_lora: bool = False
    has_4_bits: bool = False


METHODS = {
    "full": Method(),
    "full, bf16": Method(has_bf16_weights=True),
    "full, bf16, 8-bit AdamW": Method(has_bf16_weights=True, optim="adamw_torch_8bit"),
    "LoRA": Method(is_lora=True),
    "QLoRA": Method(is_lora=True, has_4_bits=True),
}


class Measured(NamedTuple):
    """A run on one H200 (docs/explanation/performance.md)."""

    model: str
    method: str
    recomputes: bool
    gib: float
    tokens_per_second: float


MEASURED = [
    Measured("Llama 1.4B", "full", recomputes=False, gib=38.3, tokens_per_second=43_800),
    Measured("Llama 8B", "LoRA", recomputes=False, gib=72.7, tokens_per_second=11_270),
    Measured("Llama 8B", "LoRA", recomputes=True, gib=20.2, tokens_per_second=7_800),
]


# --- planned cells


def planned_lines(model: str, methods: Sequence[str] = tuple(METHODS)) -> list[str]:
    """Return some lines of a model's table."""
    lines = []
    with _model_folder(MODELS[model]) as folder:
        memories = {}
        for name in methods:
            method = METHODS[name]
            if method.is_lora not in memories:
                memories[method.is_lora] = _memory(folder, method.is_lora)
            memory = replace(
                memories[method.is_lora],
                optim=method.optim,
                has_bf16_weights=method.has_bf16_weights,
                has_4bit_base=method.has_4_bits,
            )
            lines.append(_line([name, *(_cell(memory, size) for size in CARDS)]))
    return lines


def _memory(folder: Path, is_lora: bool) -> Memory:
    """Return the memory of a model with float32 weights, in full or with LoRA."""
    flags = f"{_run_flags(folder)} --dtype float32"
    if is_lora:
        flags += " --lora_r 16"
    return Memory.of(build_recipe_model(FINETUNE, flags.split(), "bf16"), on_gpu=True)


def _run_flags(folder: Path) -> str:
    """Return the flags of every run in the tables."""
    return (
        f"--model_name_or_path {folder} --tokenizer byte --dataset {folder / 'chats.jsonl'} "
        f"--max_length {TOKENS} --global_batch_size {ROWS}"
    )


def _cell(memory: Memory, size: str) -> str:
    """Return the first way in which a method fits a card, or the least memory that it needs."""
    limit = size_bytes(size) * (1 - RESERVED_MEMORY)
    totals = []
    for rows in (ROWS, 1):
        accumulation = ROWS // rows
        recomputes = least_recomputation(
            memory, ONE_PROCESS, rows=rows, accumulation=accumulation, device_bytes=limit
        ).enabled
        needed = memory.bytes_of(ONE_PROCESS, rows, accumulation, recomputes=recomputes)
        total = needed.total
        totals.append(total)
        if total <= limit:
            break

    if total > limit:
        return f"no: {min(totals) / 2**30:.1f} GiB"
    speed = _tokens_per_second(memory, CARDS[size], rows=rows, recomputes=recomputes)
    remarks = [f"{total / 2**30:.1f} GiB", f"{speed:,.0f}/s"]
    if recomputes:
        remarks.append("recomputed")
    if rows < ROWS:
        remarks.append("1 row at a time")
    return ", ".join(remarks)


def _tokens_per_second(memory: Memory, card: str, *, rows: int, recomputes: bool) -> float:
    """Return the planned speed, to three digits."""
    device, cluster = hardware_of(PlanRequest(FINETUNE, [], device=card))
    compute = estimate_compute(memory, device, USUAL_MFU)
    assert compute is not None
    step = step_time(
        memory,
        compute,
        cluster,
        ONE_PROCESS,
        rows=rows,
        accumulation=ROWS // rows,
        recomputes=recomputes,
    )
    return float(f"{ROWS * TOKENS / step.total:.3g}")


# --- measured runs


def measured_lines() -> list[str]:
    """Return the lines of the table of measured runs, beside the plans for them."""
    lines = []
    for run in MEASURED:
        with _model_folder(MEASURED_MODELS[run.model]) as folder:
            memory = _memory(folder, METHODS[run.method].is_lora)
        needed = memory.bytes_of(ONE_PROCESS, ROWS, accumulation=1, recomputes=run.recomputes)
        planned = needed.total / 2**30
        speed = _tokens_per_second(memory, CARDS["141gb"], rows=ROWS, recomputes=run.recomputes)
        cells = [
            run.model,
            run.method,
            "all blocks" if run.recomputes else "none",
            f"{run.gib:.1f} GiB",
            f"{planned:.1f} GiB",
            f"{planned / run.gib - 1:+z.0%}",
            f"{run.tokens_per_second:,.0f}",
            f"{speed:,.0f}",
        ]
        lines.append(_line(cells))
    return lines


# --- the answers of --fit


def fit_text(size: str) -> str:
    """Return the output of the command for the full fine-tuning of the 8B model on a card."""
    with _model_folder(MODELS["Qwen3-8B"]) as folder:
        command = (
            f"plan {FINETUNE} {_run_flags(folder)} --per_device_train_batch_size {ROWS} "
            f"--device {CARDS[size]} --fit {size}"
        )
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            llmtrain(command.split())
        return output.getvalue().replace(str(folder), "FOLDER")


# --- models


@contextlib.contextmanager
def _model_folder(configuration: dict[str, object]) -> Iterator[Path]:
    """Make a folder with the configuration of a model, without weights, and some conversations."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(configuration))
        write_chats(folder / "chats.jsonl")
        yield folder


# --- the page


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: tuple[str, ...], lines: list[str]) -> str:
    return "\n".join([_line([*head]), "|---" * len(head) + "|", *lines])


def _with_part(page: str, name: str, text: str) -> str:
    """Return the page with another text in the part between two marks."""
    start = f"<!-- {name} -->\n"
    end = f"\n<!-- end of {name} -->"
    assert start in page, f"{PAGE.name} has no part {name}"
    pattern = f"{re.escape(start)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{start}\n{text}\n{end}", page, flags=re.DOTALL)


def main() -> None:
    """Write the tables of the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    os.environ.update(HF_HUB_OFFLINE="1")

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=context) as pool:
        planned = pool.map(planned_lines, MODELS)
        answers = pool.map(fit_text, FIT_SIZES)
        measured = measured_lines()

        page = PAGE.read_text()
        for model, lines in zip(MODELS, planned, strict=True):
            page = _with_part(page, model, _table(HEAD, lines))
        for size, answer in zip(FIT_SIZES, answers, strict=True):
            page = _with_part(page, f"fit {size}", f"```\n{answer}```")
    page = _with_part(page, "measured", _table(MEASURED_HEAD, measured))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
