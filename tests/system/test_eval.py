"""`llmtrain eval` measures a data set as a run does, and as a plain loop over transformers does.

Other programs read the models of these runs.
"""

import io
import json
import math
import random
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from llmtrain.cli import main
from llmtrain.data.prompts import Prompts
from llmtrain.models.generation import Sampling, TextModel
from llmtrain.record.checkpoint import find_fault
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SIX_STEPS,
    SMALL_SIZE,
    TINY,
    metrics,
    write_chats,
)

BLOCK_SIZE = 32  # of TINY


class Evaluated(NamedTuple):
    """A finished run, and the eval data that it was started with."""

    run: Path
    data: list[Path]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    """Train a GPT on text, a Llama on completions in columns of other names, and an adapter."""
    folder = tmp_path_factory.mktemp("eval")
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices("abcdé ", k=length))

    def write_completions(name: str, count: int) -> Path:
        rows = [json.dumps({"q": text(9), "a": text(7)}) + "\n" for _ in range(count)]
        (folder / name).write_text("".join(rows))
        return folder / name

    def write_texts(name: str, lengths: list[int]) -> Path:
        rows = [json.dumps({"text": text(length)}) + "\n" for length in lengths]
        (folder / name).write_text("".join(rows))
        return folder / name

    def train(name: str, recipe: str, data: list[Path], flags: str) -> Evaluated:
        datasets = ["--eval_dataset", *map(str, data), "--output_dir", str(folder / name)]
        run_forked([*PYTHON, recipe, *shlex.split(flags), *datasets]).assert_ok()
        return Evaluated(folder / name, data)

    steps = shlex.join(SIX_STEPS) + " --learning_rate 0.05"
    texts = write_texts("texts.jsonl", [90] * 40)
    completions = write_completions("completions.jsonl", 40)
    chats = write_chats(folder / "chats.jsonl", seed=1)

    eval_texts = write_texts("eval-texts.jsonl", [5, 333, 70])
    gpt = train("gpt", GPT, [eval_texts], f"{shlex.join(TINY)} {steps} --dataset {texts}")
    llama = train(
        "llama",
        FINETUNE,
        [write_completions("eval.jsonl", 13), eval_texts],
        f"{steps} --config_overrides {SMALL_SIZE} --tokenizer byte --max_length 48 "
        f"--columns prompt=q completion=a --dataset {completions}",
    )
    adapter = train(
        "adapter",
        FINETUNE,
        [write_chats(folder / "eval-chats.jsonl", count=11)],
        f"{steps} --model_name_or_path {llama.run} --lora_r 4 --turns last --dataset {chats}",
    )
    return {"gpt": gpt, "llama": llama, "adapter": adapter}


def evaluate(capsys: pytest.CaptureFixture, model: Path, data: list[Path], flags: str = "") -> Any:
    """Return what the command prints as JSON."""
    capsys.readouterr()
    main(["eval", str(model), "--dataset", *map(str, data), "--json", *shlex.split(flags)])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["gpt", "llama", "adapter"])
def test_the_metrics_are_those_of_the_runs_last_evaluation(
    name: str, evaluated: dict[str, Evaluated], capsys: pytest.CaptureFixture
) -> None:
    folder, data = evaluated[name]
    logged = [entry for entry in metrics(folder) if "eval/loss" in entry][-1]
    expected = {
        key.removeprefix("eval/"): value for key, value in logged.items() if key.startswith("eval/")
    }
    assert {"loss", "perplexity", "bits_per_byte"} <= expected.keys()
    assert ("loss/eval-texts" in expected) == (len(data) > 1)

    (checkpoint,) = (folder / "checkpoints").glob("step-*6")
    for model in (folder, checkpoint, folder / "model"):
        measured = evaluate(capsys, model, data)
        assert measured == pytest.approx(expected, rel=1e-6)

    main(["eval", str(folder), "--dataset", *map(str, data)])
    assert f"loss            {expected['loss']:.4f}\n" in capsys.readouterr().out


def nll_of(model: torch.nn.Module, token_ids: list[int], first_target: int) -> float:
    """Return the negative log-likelihood of the tokens from one on, computed in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, first_target - 1 : -1]
    targets = torch.tensor(token_ids[first_target:])
    return F.cross_entropy(logits.double(), targets, reduction="sum").item()


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_metrics_are_those_of_a_plain_loop_over_transformers(
    name: str, evaluated: dict[str, Evaluated], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, (data, *_) = evaluated[name]
    copied = tmp_path / "model"  # outside the run, whose settings the command cannot read there
    shutil.copytree(folder / "model", copied)
    model = AutoModelForCausalLM.from_pretrained(copied).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(copied)
    eos = tokenizer.eos_token_id

    nll = 0.0
    targets = 0
    text_bytes = 0
    if name == "gpt":
        flags = ""
        texts = [row["text"] for row in read_rows(data)]
        text_bytes = sum(len(text.encode()) for text in texts)
        stream = [eos]
        for text in texts:
            stream += [*tokenizer(text)["input_ids"], eos]
        for start in range(0, len(stream) - 1, BLOCK_SIZE):
            row = stream[start : start + BLOCK_SIZE + 1]
            nll += nll_of(model, row, first_target=1)
            targets += len(row) - 1
    else:
        flags = "--columns prompt=q completion=a"
        for row in read_rows(data):
            question = [{"role": "user", "content": row["q"]}]
            prompt = tokenizer.apply_chat_template(
                question, add_generation_prompt=True, return_dict=False
            )
            answer = tokenizer(f"{row['a']}<|im_end|>")["input_ids"]
            nll += nll_of(model, prompt + answer, first_target=len(prompt))
            targets += len(answer)
            text_bytes += len(row["a"].encode())

    measured = evaluate(capsys, copied, [data], flags)
    assert measured["loss"] == pytest.approx(nll / targets, rel=1e-6)
    assert measured["perplexity"] == pytest.approx(math.exp(nll / targets), rel=1e-5)
    assert measured["bits_per_byte"] == pytest.approx(nll / math.log(2) / text_bytes, rel=1e-6)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("{gpt} --dataset no/such.jsonl", "--dataset no/such.jsonl"),
        ("{gpt} --dataset {empty}", "--dataset {empty}"),
        ("{gpt} --dataset {texts} --max_length 4096", "--max_length 4096"),
        ("{scorer} --dataset {texts}", "{scorer}"),
        ("no/such/model --dataset {texts}", "no/such/model"),
        ("{gpt}", "--dataset"),
        ("{gpt} --tasks hellaswag arc_easy", "lm_eval --model hf"),
    ],
)
def test_an_impossible_evaluation_is_an_error_of_one_line(
    command: str,
    message: str,
    evaluated: dict[str, Evaluated],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    gpt, texts = evaluated["gpt"]
    scorer = shutil.copytree(gpt / "model", tmp_path / "scorer")
    (scorer / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    paths = {
        "gpt": gpt,
        "texts": texts[0],
        "scorer": scorer,
        "empty": empty,
    }

    status, out, err = run_cli(capsys, "eval", *shlex.split(command.format(**paths)))

    assert (status, out) == (2, "")
    *notes, error = err.splitlines()
    assert error.startswith("error: ")
    assert message.format(**paths) in error
    assert not any(line.startswith(("error: ", "Traceback")) for line in notes)


def test_no_command_changes_the_checkpoint_that_it_reads(
    evaluated: dict[str, Evaluated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, [chats] = evaluated["adapter"]
    checkpoint = run / "checkpoints" / "step-00000006"
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))

    for command in (
        f"export {checkpoint}",
        f"export {checkpoint} --merge",
        f"export {checkpoint}/model --to {tmp_path}/exported",
        f"chat {checkpoint} --max_new_tokens 2",
        f"generate {checkpoint} --prompt a --max_new_tokens 2",
        f"eval {checkpoint} --dataset {chats}",
        f"rows {run} --step 6",
    ):
        main(shlex.split(command))
        assert find_fault(checkpoint) is None, command

    assert (run / "export-step-00000006").is_dir()
    assert (run / "merged-step-00000006").is_dir()


# --- other programs read the models


def test_a_pipeline_of_transformers_writes_what_generate_writes(
    evaluated: dict[str, Evaluated],
) -> None:
    folder = str(evaluated["llama"].run / "model")
    chat = [{"role": "user", "content": "ab"}]
    pipe = pipeline("text-generation", model=folder)
    [result] = pipe(chat, max_new_tokens=12, do_sample=False, return_tensors=True)

    ours = TextModel(folder)
    prompt = Prompts(ours.tokenizer).of_messages(chat)
    ids = result["generated_token_ids"]
    assert ids[: len(prompt)] == prompt
    text = pipe.tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
    assert "".join(ours.stream(prompt, Sampling(max_new_tokens=12, temperature=0))) == text


@pytest.mark.parametrize("name", ["gpt", "llama", "adapter"])
def test_lm_eval_loads_a_model_itself_and_scores_with_our_logits(
    name: str, evaluated: dict[str, Evaluated]
) -> None:
    """The arguments are those of docs/guides/export.md."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    folder = str(evaluated[name].run / "model")
    arguments: dict[str, Any] = {"pretrained": folder}
    if name == "gpt":
        arguments["add_bos_token"] = True
    if name == "adapter":
        base = str(evaluated["llama"].run / "model")
        arguments = {"pretrained": base, "peft": folder, "tokenizer": folder}

    loaded = huggingface.HFLM(**arguments, device="cpu")

    ours = TextModel(folder)
    if name == "gpt":
        # In the rows of recipes/gpt.py, end-of-text begins each document.
        question = "ab"
        expected = [ours.tokenizer.eos_token_id, *ours.tokenizer.encode("ab")]
    else:
        question = loaded.apply_chat_template([{"role": "user", "content": "ab"}])
        expected = Prompts(ours.tokenizer).of_question("ab")
    assert loaded.tok_encode(question) == expected

    ids = torch.tensor([expected])
    with torch.no_grad():
        torch.testing.assert_close(loaded._model_call(ids), ours.model(ids).logits)
    assert loaded.max_length == ours.context
