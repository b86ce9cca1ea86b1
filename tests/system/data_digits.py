"""Hash the rows that a version of llmtrain makes of many small data sets, to compare two versions.

`python -m tests.system.data_digits OUT.json [TREE]` makes the rows of every case with the source in
TREE, and writes the sha256 of their columns. A refactoring changes no bit and no error message.
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

from tests.data import chats, odd_templates, published_templates
from tests.launching import ROOT, write_text

Record: TypeAlias = dict[str, Any]
Flags: TypeAlias = dict[str, Any]
Case: TypeAlias = dict[str, Any]  # the result of `case_of`
NamedCase: TypeAlias = tuple[str, Case]
Digits: TypeAlias = dict[str, dict[str, Any]]  # a hash or number by case and by column or property

# Runs in the tree to be measured, and uses only its public names.
PROGRAM = """
import hashlib, json, sys
import numpy as np
import llmtrain as lt
from llmtrain.errors import UserError

METADATA = (
    "data_sha256", "train_tokens", "eval_tokens", "train_rows", "eval_rows", "eval_bytes",
    "source_rows", "eval_source_rows", "source_targets", "block_size", "vocabulary",
    "tokenizer_sha256", "task", "pairs", "shared",
)

def digest_of(rows, name):
    values = np.array([row[name] for row in rows])
    return hashlib.sha256(f"{values.shape} ".encode() + values.astype("<i8").tobytes()).hexdigest()

def digits_of(case):
    config = None
    if case["chat"]:
        kind, flags = case["chat"]
        config = {"chat": lt.ChatConfig, "pairs": lt.PairConfig}[kind](**flags)
    data = lt.DataConfig(**case["data"])
    try:
        rows = lt.tokenize(data, case["max_length"], config, unpaired=case["unpaired"])
    except UserError as error:
        return {"error": str(error)}
    digits = {name: getattr(rows.metadata, name) for name in METADATA}
    digits["stop_token_ids"] = list(rows.stop_token_ids)
    digits["eval_sources"] = rows.eval_sources
    for split in ("train", "eval"):
        split_rows = getattr(rows, split)
        if split_rows is not None:
            for name in split_rows.column_names:
                digits[f"{split}/{name}"] = digest_of(split_rows, name)
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


def write_inputs(folder: Path) -> dict[str, Case]:
    """Write the data sets, the tokenizers and ``cases.json``, and return the cases by name."""
    folder.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Case] = {}
    # Later groups use data sets and tokenizers of earlier ones.
    groups = [
        text_cases,
        format_cases,
        template_cases,
        published_cases,
        process_cases,
        pair_cases,
        mixed_cases,
        bad_cases,
        bad_pair_cases,
    ]
    for cases_of_group in groups:
        for name, case in cases_of_group(folder):
            assert name not in cases, name
            cases[name] = case
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    return cases


def case_of(
    *paths: Path,
    tokenizer: str | Path = "byte",
    max_length: int | str = 95,
    chat: Flags | None = None,
    pairs: Flags | None = None,
    unpaired: bool = False,
    **data: Any,
) -> Case:
    """Return the arguments of ``lt.tokenize``, as JSON.

    Args:
        paths: the data sets.
        tokenizer: the name or folder of a tokenizer.
        max_length: tokens per row.
        chat: fields of ``ChatConfig``, for conversations.
        pairs: fields of ``PairConfig``, for preferences.
        unpaired: whether answers are judged one by one.
        data: further fields of ``DataConfig``.
    """
    config: list[Any] | None = None
    if chat is not None:
        config = ["chat", chat]
    elif pairs is not None:
        config = ["pairs", pairs]
    return {
        "data": {
            "dataset": [str(path) for path in paths],
            "tokenizer": str(tokenizer),
            **data,
        },
        "max_length": max_length,
        "chat": config,
        "unpaired": unpaired,
    }


def write_records(path: Path, records: list[Record]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# --- text


def text_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases of plain text: few and many documents, all tokenizers, isolated or not."""
    text = write_text(folder / "text.txt")
    documents = random_documents(120)
    empty_document = {"text": ""}
    many = write_records(folder / "documents.jsonl", documents)
    table = write_records(folder / "documents.parquet", documents)
    few = write_records(folder / "few.jsonl", documents[:3])
    empty = write_records(folder / "empty.jsonl", [empty_document, *documents[:30], empty_document])
    special = write_records(
        folder / "special.jsonl", [{"text": "a <|im_end|> b </s> c"}, *documents[:20]]
    )
    data_sets = {"one": text, "many": many, "few": few, "empty": empty, "special": special}

    chats.make("{{ messages }}").save_pretrained(folder / "own")
    published_templates.tokenizer_of("qwen3").save_pretrained(folder / "qwen")
    write_tokenizer_with_bos(folder / "bos")
    tokenizers = ["char", "byte", "bpe:300", folder / "own", folder / "qwen", folder / "bos"]

    for tokenizer, name, isolated in itertools.product(tokenizers, data_sets, (False, True)):
        yield (
            f"text {name} {Path(tokenizer).name} isolated={isolated}",
            case_of(
                data_sets[name], tokenizer=tokenizer, max_length=32, isolate_documents=isolated
            ),
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


def random_documents(count: int) -> list[Record]:
    """Return documents of 1 to 60 words."""
    draw = random.Random(1)
    documents = []
    for _ in range(count):
        word_count = draw.randint(1, 60)
        words = [draw.choice(["a", "bc", "漢字", "🙂", "long word"]) for _ in range(word_count)]
        documents.append({"text": " ".join(words)})
    return documents


def write_tokenizer_with_bos(folder: Path) -> None:
    """Write a tokenizer that begins every text with BOS."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = chats.make(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)


# --- conversations


def conversation(*contents: str) -> Record:
    """Return messages of the user and the assistant, in turn."""
    roles = itertools.cycle(["user", "assistant"])
    pairs = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def conversations(count: int, seed: int = 0) -> list[Record]:
    """Return conversations of one to six turns."""
    draw = random.Random(seed)
    words = ["yes", "no ", " the answer", "\n", "question?", "漢字", "🙂", "e\u0301", "x" * 30]

    def random_text() -> str:
        return "".join(draw.choices(words, k=draw.randint(1, 5)))

    records = []
    for number in range(count):
        turns = draw.choice([1, 1, 2, 3, 6])
        contents = [f"{number} {random_text()}" for _ in range(2 * turns)]
        records.append(conversation(*contents))
    return records


def records_by_format() -> dict[str, list[Record]]:
    """Return conversations in every format."""
    draw = random.Random(2)
    numbers = range(40)
    answers = [f"{i * i} " + "ü." * draw.randint(1, 9) for i in numbers]

    def system_of(number: int) -> Record:
        """Return the system prompt of every third record."""
        return {"system": "Be brief."} if number % 3 == 0 else {}

    prompt_completion = [{"prompt": f"{i}?", "completion": answers[i]} for i in numbers]
    message_prompts = [
        {
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "completion": [{"role": "assistant", "content": answers[i]}],
        }
        for i in numbers
    ]
    sharegpt = [
        {
            **system_of(i),
            "conversations": [
                {"from": "human", "value": f"{i}?"},
                {"from": "gpt", "value": answers[i]},
            ],
        }
        for i in numbers
    ]
    alpaca = [
        {**system_of(i), "instruction": f"{i}?", "input": "x" * (i % 4), "output": answers[i]}
        for i in numbers
    ]
    weights = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": answers[i], "weight": i % 2},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "so"},
            ]
        }
        for i in numbers
    ]
    tool_calls = [{"messages": chats.CALLING, "tools": [chats.TOOL]} for _ in range(3)]
    special_tokens = [conversation(f"{i} <|im_end|>", f"<|im_start|>{i}</s> ok") for i in numbers]

    other_fields = []
    for i, record in enumerate(conversations(20, seed=4)):
        messages = [{**message, "mood": i} for message in record["messages"]]
        other_fields.append({"messages": messages})

    return {
        "messages": conversations(40),
        "prompt_completion": prompt_completion,
        "prompt_completion of messages": message_prompts,
        "sharegpt": sharegpt,
        "alpaca": alpaca,
        "weights": weights,
        "calls": [*tool_calls, *conversations(20, seed=3)],
        "special tokens": special_tokens,
        "other fields": other_fields,
        "same prompt": [conversation("same?", answer) for answer in answers],
    }


def format_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases of every format, packed or not, and of every way to leave records out."""
    records = records_by_format()
    tokenizer = folder / "chatml"
    chats.make(chats.unmarked(chats.TEMPLATES["chatml"])).save_pretrained(tokenizer)
    for name, records_of_format in records.items():
        path = write_records(folder / f"{name}.jsonl", records_of_format)
        for packing, tokenizer_name in itertools.product((True, False), ("byte", tokenizer)):
            yield (
                f"{name} packing={packing} {Path(tokenizer_name).name}",
                case_of(path, tokenizer=tokenizer_name, chat={"packing": packing}),
            )

    messages = folder / "messages.jsonl"
    for overlong, turns, max_length in itertools.product(
        ("drop", "truncate"), ("all", "last"), (60, 150, "auto")
    ):
        flags = {"overlong": overlong, "turns": turns, "on_bad_row": "skip"}
        yield (
            f"messages {overlong} {turns} {max_length}",
            case_of(messages, tokenizer=tokenizer, max_length=max_length, chat=flags),
        )
    yield "messages bpe", case_of(messages, tokenizer="bpe:300", chat={})

    prompts = folder / "prompt_completion.jsonl"
    yield "plain prompts", case_of(prompts, chat={"chat_template": "none"})
    yield "plain prompts of a tokenizer", case_of(prompts, tokenizer=folder / "bos", chat={})

    parquet = write_records(folder / "messages.parquet", records["messages"])
    yield "messages parquet", case_of(parquet, chat={})
    json_array = write_records(folder / "sharegpt.json", records["sharegpt"])
    yield "sharegpt json", case_of(json_array, chat={})

    renamed = [
        {"q": record["prompt"], "a": record["completion"]}
        for record in records["prompt_completion"]
    ]
    columns = write_records(folder / "renamed.jsonl", renamed)
    yield "columns", case_of(columns, columns=["prompt=q", "completion=a"], chat={})

    few = write_records(folder / "three.jsonl", conversations(3))
    yield "few records", case_of(few, chat={})
    yield "eval data of chats", case_of(messages, eval_dataset=[str(parquet)], chat={})


def template_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases of templates with and without generation blocks, and of reasoning."""
    templates = {f"{name} unmarked": chats.unmarked(text) for name, text in chats.TEMPLATES.items()}
    templates |= {f"{name} marked": chats.marked(text) for name, text in chats.TEMPLATES.items()}
    for name, template in odd_templates.LOOKING_AHEAD.items():
        templates[f"ahead {name}"] = template
    templates |= {
        "qwen3": chats.QWEN3,
        "r1": chats.R1,
        "ended twice": odd_templates.ENDED_TWICE,
        "without first": odd_templates.WITHOUT_FIRST,
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
    pairs = write_records(folder / "template pairs.jsonl", preferences(15))
    for name, template in templates.items():
        tokenizer = folder / f"template {name}"
        chats.make(template).save_pretrained(tokenizer)
        flags = {"on_bad_row": "skip"}
        for data, path in {"plain": plain, "reasoning": thinking}.items():
            yield (
                f"template {name} {data}",
                case_of(path, tokenizer=tokenizer, max_length=600, chat=flags),
            )
        yield (
            f"template {name} pairs",
            case_of(pairs, tokenizer=tokenizer, max_length=300, pairs=flags),
        )


def published_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield a case for each published template, with conversations of every kind."""
    records = []
    for kind, messages in published_templates.KINDS.items():
        record: Record = {"messages": messages}
        if "call" in kind or any("tool_calls" in message for message in messages):
            record["tools"] = published_templates.TOOLS
        records.append(record)
    path = write_records(folder / "kinds.jsonl", records)
    for name in published_templates.TEMPLATES:
        tokenizer = folder / f"published {name}"
        published_templates.tokenizer_of(name).save_pretrained(tokenizer)
        flags = {"on_bad_row": "skip"}
        yield (
            f"published {name}",
            case_of(path, tokenizer=tokenizer, max_length=3000, chat=flags, eval_fraction=0.0),
        )


def process_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases with so many records that processes are started, and the same in one process."""
    path = write_records(folder / "thousands.jsonl", conversations(2_300, seed=7))
    pairs = write_records(folder / "thousands of pairs.jsonl", preferences(2_300))
    tokenizer = folder / "chatml"
    for processes in (1, 2):
        flags = {"dataset_num_proc": processes}
        yield f"processes={processes} chats", case_of(path, tokenizer=tokenizer, chat=flags)
        yield f"processes={processes} pairs", case_of(pairs, tokenizer=tokenizer, pairs=flags)


# --- preferences


def preferences(count: int) -> list[Record]:
    """Return pairs with answers of different lengths."""
    draw = random.Random(8)
    return [
        {
            "prompt": f"{i} " + "why? " * draw.randint(1, 4),
            "chosen": f"{i * i} " + "ü." * draw.randint(1, 9),
            "rejected": "no " * draw.randint(1, 5),
        }
        for i in range(count)
    ]


def pair_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases of pairs and of single answers with labels."""
    pairs = preferences(40)
    labelled = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 3 > 0}
        for i, pair in enumerate(pairs)
    ]
    message_pairs = [
        {
            "chosen": conversation(pair["prompt"], pair["chosen"])["messages"],
            "rejected": conversation(pair["prompt"], pair["rejected"])["messages"],
        }
        for pair in pairs
    ]
    paths = {
        "pairs": write_records(folder / "pairs.jsonl", pairs),
        "labelled": write_records(folder / "labelled.jsonl", labelled),
        "whole": write_records(folder / "whole.jsonl", message_pairs),
        "whole parquet": write_records(folder / "whole.parquet", message_pairs),
    }
    for name, path in paths.items():
        yield from packed_pair_cases(name, path, tokenizer=folder / "chatml")

    for unpaired in (False, True):
        yield (
            f"plain pairs unpaired={unpaired}",
            case_of(paths["pairs"], tokenizer=folder / "bos", pairs={}, unpaired=unpaired),
        )
        yield (
            f"pairs byte unpaired={unpaired}",
            case_of(paths["pairs"], pairs={}, unpaired=unpaired, eval_fraction=0.3),
        )


def packed_pair_cases(name: str, path: Path, tokenizer: Path) -> Iterator[NamedCase]:
    """Yield a case of one data set for each way to put pairs into rows."""
    booleans = (True, False)
    for unpaired, packing, sharing in itertools.product((False, True), booleans, booleans):
        for overlong, max_length in itertools.product(("drop", "truncate"), (70, "auto")):
            flags = {
                "packing": packing,
                "share_prompts": sharing,
                "overlong": overlong,
                "on_bad_row": "skip",
            }
            options = f"unpaired={unpaired} packing={packing} sharing={sharing} {overlong}"
            yield (
                f"{name} {options} {max_length}",
                case_of(
                    path,
                    tokenizer=tokenizer,
                    max_length=max_length,
                    pairs=flags,
                    unpaired=unpaired,
                ),
            )


# --- several kinds, and records that cannot be used


def mixed_cases(folder: Path) -> Iterator[NamedCase]:
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


# How a record that cannot be used is treated, by the name of the treatment in the names of cases.
TREATMENTS: dict[str, Flags] = {
    "default": {},
    "skip": {"on_bad_row": "skip"},
    "error": {"overlong": "error"},
    "truncate": {"overlong": "truncate"},
    "truncate skip": {"overlong": "truncate", "on_bad_row": "skip"},
}


def bad_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases with a conversation that cannot be used, among good ones and by itself."""
    good_records = conversations(12, seed=9)
    bad_records: dict[str, Record] = {
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
    for name, record in bad_records.items():
        among_good = write_records(folder / f"bad {name}.jsonl", [*good_records, record])
        by_itself = write_records(folder / f"only {name}.jsonl", [record])
        for treatment, flags in TREATMENTS.items():
            yield f"bad {name} {treatment}", case_of(among_good, chat=flags, eval_fraction=0.0)
            yield f"only {name} {treatment}", case_of(by_itself, chat=flags, eval_fraction=0.0)


def bad_pair_cases(folder: Path) -> Iterator[NamedCase]:
    """Yield cases with a pair that cannot be used."""
    bad_pairs: dict[str, Record] = {
        "same": {"prompt": "a", "chosen": "b", "rejected": "b"},
        "no prompt": {"chosen": "b", "rejected": "c"},
        "long": {"prompt": "a" * 500, "chosen": "b", "rejected": "c"},
        "long answer": {"prompt": "a", "chosen": "b" * 500, "rejected": "c"},
        "single": {"prompt": "a", "completion": "b", "label": True},
    }
    for name, record in bad_pairs.items():
        path = write_records(folder / f"bad pair {name}.jsonl", [*preferences(12), record])
        for treatment, flags in TREATMENTS.items():
            for unpaired in (False, True):
                yield (
                    f"bad pair {name} {treatment} unpaired={unpaired}",
                    case_of(path, pairs=flags, unpaired=unpaired, eval_fraction=0.0),
                )


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    tree = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ROOT
    with tempfile.TemporaryDirectory() as temporary_folder:
        # Error messages name the files, so the folder is the same in every comparison.
        inputs = Path(os.environ.get("DATA_DIGITS_INPUTS", temporary_folder))
        if not (inputs / "cases.json").exists():
            write_inputs(inputs)
        digits = measure(tree, inputs, target)
    errors = [name for name, digits_of_case in digits.items() if "error" in digits_of_case]
    print(f"{len(digits)} cases, {len(errors)} of them errors")


if __name__ == "__main__":
    main()
