"""Hash the rows that a version of the source makes of many small data sets, to compare two versions.

`python -m tests.system.data_digits OUT.json [TREE]` makes the rows of every case with the source in TREE, and writes
the sha256 of their columns. A refactoring leaves every bit as it was, and every error message.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow
import pyarrow.parquet

from tests.data import chats
from tests.data import test_published_templates as published
from tests.data import test_shortcuts as shortcuts
from tests.launching import ROOT, write_text

Fields: TypeAlias = dict[str, Any]
Digits: TypeAlias = dict[
    str, dict[str, Any]
]  # name of a case -> what was made -> its hash or number

# Runs in the tree that is measured, and uses nothing of it but its public names.
PROGRAM = """
import hashlib, json, sys
import numpy as np
import llmtrain as lt
from llmtrain.errors import UserError

METADATA = ("data_sha256", "train_tokens", "eval_tokens", "train_rows", "eval_rows", "eval_bytes", "source_rows",
            "eval_source_rows", "source_targets", "block_size", "vocabulary", "tokenizer_sha256", "task", "pairs", "shared")

def digest_of(column):
    digest = hashlib.sha256()
    for chunk in column.chunks:
        values = np.asarray(chunk.flatten().to_numpy(zero_copy_only=False))
        digest.update(f"{values.dtype} {len(chunk)} ".encode() if len(chunk) else b"")
        digest.update(values.tobytes())
    return digest.hexdigest()

def digits_of(case):
    kind, flags = case["chat"] or ("", {})
    chat = {"": lambda **_: None, "chat": lt.ChatConfig, "pairs": lt.PairConfig}[kind](**flags)
    try:
        rows = lt.tokenize(lt.DataConfig(**case["data"]), case["max_length"], chat, unpaired=case["unpaired"])
    except UserError as error:
        return {"error": str(error)}
    digits = {name: getattr(rows.metadata, name) for name in METADATA}
    digits["stop_token_ids"] = list(rows.stop_token_ids)
    digits["eval_sources"] = rows.eval_sources
    for split in ("train", "eval"):
        of_split = getattr(rows, split)
        if of_split is not None:
            for name in of_split.column_names:
                digits[f"{split}/{name}"] = digest_of(of_split.data.column(name))
    return digits

folder, target = sys.argv[1:]
cases = json.load(open(f"{folder}/cases.json"))
json.dump({name: digits_of(case) for name, case in cases.items()}, open(target, "w"), indent=1)
"""


def measure(tree: Path, inputs: Path, target: Path) -> Digits:
    """Make the rows of every case with the source in ``tree``.

    Args:
        tree: the source.
        inputs: the folder of :func:`write_inputs`.
        target: the file to write.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "LLMTRAIN_CACHE": cache,
            "PYTHONPATH": str(tree),
        }
        environment.pop("RANK", None)
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(inputs), str(target)],
            cwd=tree,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    digits: Digits = json.loads(target.read_text())
    return digits


def write_inputs(folder: Path) -> dict[str, Fields]:
    """Write the data sets, the tokenizers and ``cases.json``, and return the cases."""
    folder.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Fields] = {}
    for name, case in itertools.chain(
        text_cases(folder),
        format_cases(folder),
        template_cases(folder),
        published_cases(folder),
        process_cases(folder),
        pair_cases(folder),
        mixed_cases(folder),
        bad_cases(folder),
    ):
        assert name not in cases, name
        cases[name] = case
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    return cases


def case_of(
    *paths: Path,
    tokenizer: str | Path = "byte",
    max_length: int | str = 95,
    chat: Fields | None = None,
    pairs: Fields | None = None,
    unpaired: bool = False,
    **data: Any,
) -> Fields:
    """Return the arguments of ``tokenize``, as JSON."""
    kinds = [
        [name, flags] for name, flags in (("chat", chat), ("pairs", pairs)) if flags is not None
    ]
    settings = {"dataset": [str(path) for path in paths], "tokenizer": str(tokenizer), **data}
    return {
        "data": settings,
        "max_length": max_length,
        "chat": kinds[0] if kinds else None,
        "unpaired": unpaired,
    }


def write_records(path: Path, records: list[Fields]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- text


def text_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases of plain text: few and many documents, all tokenizers, isolated or not."""
    text = write_text(folder / "text.txt")
    draw = random.Random(1)
    documents = [
        {
            "text": " ".join(
                draw.choice(["a", "bc", "漢字", "🙂", "long word"])
                for _ in range(draw.randint(1, 60))
            )
        }
        for _ in range(120)
    ]
    many = write_records(folder / "documents.jsonl", documents)
    table = write_records(folder / "documents.parquet", documents)
    few = write_records(folder / "few.jsonl", documents[:3])
    empty = write_records(folder / "empty.jsonl", [{"text": ""}, *documents[:30], {"text": ""}])
    special = write_records(
        folder / "special.jsonl", [{"text": "a <|im_end|> b </s> c"}, *documents[:20]]
    )
    own = chats.make("{{ messages }}")
    own.save_pretrained(folder / "own")
    published.tokenizer_of("qwen3").save_pretrained(folder / "qwen")
    with_bos = bos_tokenizer(folder / "bos")

    tokenizers = ["char", "byte", "bpe:300", folder / "own", folder / "qwen", with_bos]
    for tokenizer, (name, path), isolated in itertools.product(
        tokenizers,
        {"one": text, "many": many, "few": few, "empty": empty, "special": special}.items(),
        (False, True),
    ):
        yield (
            f"text {name} {Path(tokenizer).name} isolated={isolated}",
            case_of(path, tokenizer=tokenizer, max_length=32, isolate_documents=isolated),
        )
    for fraction in (0.0, 0.02, 0.3, 0.8):
        yield f"text eval {fraction}", case_of(many, max_length=16, eval_fraction=fraction)
        yield f"text one eval {fraction}", case_of(text, max_length=16, eval_fraction=fraction)
    yield "text eval data", case_of(many, max_length=16, eval_dataset=[str(text)])
    yield (
        "text eval data, two",
        case_of(many, text, max_length=16, eval_dataset=[str(few), str(empty)]),
    )
    yield "text two sources", case_of(text, table, max_length=16, mixture=[0.7, 0.3])
    yield "text columns", case_of(many, max_length=16, columns=["text=text"])
    yield "text long rows", case_of(text, max_length=5000, eval_fraction=0.0)
    yield "text too short", case_of(few, max_length=50_000)


def bos_tokenizer(folder: Path) -> Path:
    """Save a tokenizer that begins every text with BOS."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = chats.make(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


# --- conversations


def conversation(*contents: str, system: str | None = None) -> Fields:
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages}


def conversations(count: int, seed: int = 0) -> list[Fields]:
    """Return conversations of one to six turns."""
    draw = random.Random(seed)
    words = ["yes", "no ", " the answer", "\n", "question?", "漢字", "🙂", "e\u0301", "x" * 30]
    records = []
    for number in range(count):
        turns = draw.choice([1, 1, 2, 3, 6])
        contents = [
            f"{number} " + "".join(draw.choices(words, k=draw.randint(1, 5)))
            for _ in range(2 * turns)
        ]
        records.append(conversation(*contents))
    return records


def format_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases of every format, packed or not, and of every way to leave records out."""
    draw = random.Random(2)
    numbers = range(40)
    answers = [f"{i * i} " + "ü." * draw.randint(1, 9) for i in numbers]
    system = [{"system": "Be brief."} if i % 3 == 0 else {} for i in numbers]
    records: dict[str, list[Fields]] = {
        "messages": conversations(40),
        "prompt_completion": [{"prompt": f"{i}?", "completion": answers[i]} for i in numbers],
        "prompt_completion of messages": [
            {
                "prompt": [{"role": "user", "content": f"{i}?"}],
                "completion": [{"role": "assistant", "content": answers[i]}],
            }
            for i in numbers
        ],
        "sharegpt": [
            {
                **system[i],
                "conversations": [
                    {"from": "human", "value": f"{i}?"},
                    {"from": "gpt", "value": answers[i]},
                ],
            }
            for i in numbers
        ],
        "alpaca": [
            {**system[i], "instruction": f"{i}?", "input": "x" * (i % 4), "output": answers[i]}
            for i in numbers
        ],
        "weights": [
            {
                "messages": [
                    {"role": "user", "content": f"{i}?"},
                    {"role": "assistant", "content": answers[i], "weight": i % 2},
                    {"role": "user", "content": "and?"},
                    {"role": "assistant", "content": "so"},
                ]
            }
            for i in numbers
        ],
        "calls": [{"messages": chats.CALLING, "tools": [chats.TOOL]} for _ in range(3)]
        + conversations(20, seed=3),
        "special tokens": [
            conversation(f"{i} <|im_end|>", f"<|im_start|>{i}</s> ok") for i in numbers
        ],
        "other fields": [
            {"messages": [{**message, "mood": i} for message in record["messages"]]}
            for i, record in enumerate(conversations(20, seed=4))
        ],
        "same prompt": [conversation("same?", answer) for answer in answers],
    }
    tokenizer = folder / "chatml"
    chats.make(chats.unmarked(chats.TEMPLATES["chatml"])).save_pretrained(tokenizer)
    for name, of_format in records.items():
        path = write_records(folder / f"{name}.jsonl", of_format)
        for packing, own in itertools.product((True, False), ("byte", tokenizer)):
            yield (
                f"{name} packing={packing} {Path(own).name}",
                case_of(path, tokenizer=own, chat={"packing": packing}),
            )
    messages = folder / "messages.jsonl"
    for overlong, turns, max_length in itertools.product(
        ("drop", "truncate"), ("all", "last"), (60, 150, "auto")
    ):
        yield (
            f"messages {overlong} {turns} {max_length}",
            case_of(
                messages,
                tokenizer=tokenizer,
                max_length=max_length,
                chat={"overlong": overlong, "turns": turns, "on_bad_row": "skip"},
            ),
        )
    yield "messages bpe", case_of(messages, tokenizer="bpe:300", chat={})
    yield (
        "plain prompts",
        case_of(folder / "prompt_completion.jsonl", chat={"chat_template": "none"}),
    )
    yield (
        "plain prompts of a tokenizer",
        case_of(folder / "prompt_completion.jsonl", tokenizer=folder / "bos", chat={}),
    )
    parquet = write_records(folder / "messages.parquet", records["messages"])
    yield "messages parquet", case_of(parquet, chat={})
    array = write_records(folder / "sharegpt.json", records["sharegpt"])
    yield "sharegpt json", case_of(array, chat={})
    renamed = [
        {"q": record["prompt"], "a": record["completion"]}
        for record in records["prompt_completion"]
    ]
    columns = write_records(folder / "renamed.jsonl", renamed)
    yield "columns", case_of(columns, columns=["prompt=q", "completion=a"], chat={})
    yield "few records", case_of(write_records(folder / "three.jsonl", conversations(3)), chat={})
    yield "eval data of chats", case_of(messages, eval_dataset=[str(parquet)], chat={})


def template_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases of templates with and without generation blocks, and of reasoning."""
    templates = {f"{name} unmarked": chats.unmarked(text) for name, text in chats.TEMPLATES.items()}
    templates |= {f"{name} marked": chats.marked(text) for name, text in chats.TEMPLATES.items()}
    templates |= {
        f"ahead {name}": shortcuts.LOOKING_AHEAD.replace("AHEAD", condition)
        for name, condition in shortcuts.LOOKS_AHEAD.items()
    }
    templates |= {
        "qwen3": chats.QWEN3,
        "r1": chats.R1,
        "ended twice": shortcuts.ENDED_TWICE,
        "without first": shortcuts.WITHOUT_FIRST,
    }
    reasoning = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": f"{i}.", "reasoning_content": f"why {i}"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "<think>\nso\n</think>\n\nthus <|im_end|>"},
            ]
        }
        for i in range(12)
    ]
    plain = write_records(folder / "template.jsonl", conversations(25, seed=5))
    thinking = write_records(folder / "reasoning.jsonl", reasoning + conversations(10, seed=6))
    for name, template in templates.items():
        tokenizer = folder / f"template {name}"
        chats.make(template).save_pretrained(tokenizer)
        for data, path in {"plain": plain, "reasoning": thinking}.items():
            yield (
                f"template {name} {data}",
                case_of(path, tokenizer=tokenizer, max_length=600, chat={"on_bad_row": "skip"}),
            )
        pairs = write_records(folder / "template pairs.jsonl", preferences(15))
        yield (
            f"template {name} pairs",
            case_of(pairs, tokenizer=tokenizer, max_length=300, pairs={"on_bad_row": "skip"}),
        )


def published_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield a case for each published template, with conversations of every kind."""
    records = []
    for kind, messages in published.KINDS.items():
        record: Fields = {"messages": messages}
        if "call" in kind or any("tool_calls" in message for message in messages):
            record["tools"] = published.TOOLS
        records.append(record)
    path = write_records(folder / "kinds.jsonl", records)
    for name in published.TEMPLATES:
        tokenizer = folder / f"published {name}"
        published.tokenizer_of(name).save_pretrained(tokenizer)
        flags = {"on_bad_row": "skip"}
        yield (
            f"published {name}",
            case_of(path, tokenizer=tokenizer, max_length=3000, chat=flags, eval_fraction=0.0),
        )


def process_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases with so many records that processes are started, and the same in one process."""
    path = write_records(folder / "thousands.jsonl", conversations(2_300, seed=7))
    pairs = write_records(folder / "thousands of pairs.jsonl", preferences(2_300))
    tokenizer = folder / "chatml"
    for processes in (1, 2):
        flags = {"dataset_num_proc": processes}
        yield f"processes={processes} chats", case_of(path, tokenizer=tokenizer, chat=flags)
        yield f"processes={processes} pairs", case_of(pairs, tokenizer=tokenizer, pairs=flags)


# --- preferences


def preferences(count: int) -> list[Fields]:
    draw = random.Random(8)
    return [
        {
            "prompt": f"{i} " + "why? " * draw.randint(1, 4),
            "chosen": f"{i * i} " + "ü." * draw.randint(1, 9),
            "rejected": "no " * draw.randint(1, 5),
        }
        for i in range(count)
    ]


def pair_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases of pairs and of single answers with labels."""
    pairs = preferences(40)
    labelled = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 3 > 0}
        for i, pair in enumerate(pairs)
    ]
    whole = [
        {
            "chosen": conversation(pair["prompt"], pair["chosen"])["messages"],
            "rejected": conversation(pair["prompt"], pair["rejected"])["messages"],
        }
        for pair in pairs
    ]
    paths = {
        "pairs": write_records(folder / "pairs.jsonl", pairs),
        "labelled": write_records(folder / "labelled.jsonl", labelled),
        "whole": write_records(folder / "whole.jsonl", whole),
        "whole parquet": write_records(folder / "whole.parquet", whole),
    }
    for (name, path), unpaired, packing, sharing, overlong in itertools.product(
        paths.items(), (False, True), (True, False), (True, False), ("drop", "truncate")
    ):
        flags = {
            "packing": packing,
            "share_prompts": sharing,
            "overlong": overlong,
            "on_bad_row": "skip",
        }
        for max_length in (70, "auto"):
            yield (
                f"{name} unpaired={unpaired} packing={packing} sharing={sharing} {overlong} {max_length}",
                case_of(
                    path,
                    tokenizer=folder / "chatml",
                    max_length=max_length,
                    pairs=flags,
                    unpaired=unpaired,
                ),
            )
    for unpaired in (False, True):
        yield (
            f"plain pairs unpaired={unpaired}",
            case_of(paths["pairs"], tokenizer=folder / "bos", pairs={}, unpaired=unpaired),
        )
        yield (
            f"pairs byte unpaired={unpaired}",
            case_of(paths["pairs"], pairs={}, unpaired=unpaired, eval_fraction=0.3),
        )


# --- several kinds, and records that cannot be used


def mixed_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases of text beside conversations."""
    for packing, tokenizer in itertools.product((True, False), ("byte", folder / "chatml")):
        yield (
            f"text and chats packing={packing} {Path(tokenizer).name}",
            case_of(
                folder / "documents.jsonl",
                folder / "messages.jsonl",
                tokenizer=tokenizer,
                chat={"packing": packing},
            ),
        )
    yield (
        "chats, evaluated on text",
        case_of(folder / "messages.jsonl", eval_dataset=[str(folder / "few.jsonl")], chat={}),
    )


def bad_cases(folder: Path) -> Iterator[tuple[str, Fields]]:
    """Yield cases with a record that cannot be used, which is an error or skipped."""
    good = conversations(12, seed=9)
    bad: dict[str, Fields] = {
        "unanswered": {"messages": [{"role": "user", "content": "a"}]},
        "no messages": {"messages": []},
        "half of a pair": conversation("a \ud800", "b"),
        "private use": conversation("a", "b <|im_end|> \U000f0000"),
        "role": {"messages": [{"role": "boss", "content": "a"}]},
        "empty answer": conversation("a", " "),
        "number": {"messages": [{"role": "user", "content": 3}]},
        "two formats": {**conversation("a", "b"), "prompt": "a", "completion": "b"},
        "weights in a turn": {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
                {"role": "assistant", "content": "c"},
            ]
        },
        "long": conversation("a" * 500, "b"),
        "nothing fits": conversation("a", "b" * 500),
    }
    for name, record in bad.items():
        path = write_records(folder / f"bad {name}.jsonl", [*good, record])
        alone = write_records(folder / f"only {name}.jsonl", [record])
        for flags in (
            {},
            {"on_bad_row": "skip"},
            {"overlong": "error"},
            {"overlong": "truncate"},
            {"overlong": "truncate", "on_bad_row": "skip"},
        ):
            said = " ".join(flags.values()) or "default"
            yield f"bad {name} {said}", case_of(path, chat=flags, eval_fraction=0.0)
            yield f"only {name} {said}", case_of(alone, chat=flags, eval_fraction=0.0)

    bad_pairs: dict[str, Fields] = {
        "same": {"prompt": "a", "chosen": "b", "rejected": "b"},
        "no prompt": {"chosen": "b", "rejected": "c"},
        "long": {"prompt": "a" * 500, "chosen": "b", "rejected": "c"},
        "long answer": {"prompt": "a", "chosen": "b" * 500, "rejected": "c"},
        "single": {"prompt": "a", "completion": "b", "label": True},
    }
    for name, record in bad_pairs.items():
        path = write_records(folder / f"bad pair {name}.jsonl", [*preferences(12), record])
        for flags, unpaired in itertools.product(
            (
                {},
                {"on_bad_row": "skip"},
                {"overlong": "error"},
                {"overlong": "truncate"},
                {"overlong": "truncate", "on_bad_row": "skip"},
            ),
            (False, True),
        ):
            said = " ".join(flags.values()) or "default"
            yield (
                f"bad pair {name} {said} unpaired={unpaired}",
                case_of(path, pairs=flags, unpaired=unpaired, eval_fraction=0.0),
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as inputs_name:
        # Error messages name the files, so the folder is the same in every comparison.
        inputs = Path(os.environ.get("DATA_DIGITS_INPUTS", inputs_name))
        if not (inputs / "cases.json").exists():
            write_inputs(inputs)
        source = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT
        made = measure(source, inputs, Path(sys.argv[1]).resolve())
    errors = sum("error" in digits for digits in made.values())
    print(f"{len(made)} cases, {errors} of them errors")
