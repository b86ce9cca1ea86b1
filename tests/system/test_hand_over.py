"""docs/guides/hand-over.md: TRL goes on from a finished model as it was trained, and its result comes back."""

import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation
from llmtrain.data.render import Renderer
from llmtrain.models.generation import TextModel
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    PREFERENCE,
    PYTHON,
    ROOT,
    long_form,
    series,
    write_pairs,
)

# TRL 1.16 calls transformers 5.23 by names that it is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE = ROOT / "docs" / "guides" / "hand-over.md"
SCRIPT = ROOT.joinpath("docs", "migrate", "trl_grpo.py")
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def grpo() -> dict[str, Any]:
    """The names in the script of the page."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """Let each trainer begin as the first of its process."""

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@pytest.fixture(scope="module")
def conversations(grpo: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with the questions of the script, and their answers."""
    path = tmp_path_factory.mktemp("capitals") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats(grpo) * 8))
    return path


@pytest.fixture(scope="module")
def finished(conversations: Path) -> Path:
    """The finished model of a run that has learnt to answer, and to end its answer."""
    folder = conversations.with_name("run")
    shape = "hidden_size=32,num_hidden_layers=2,intermediate_size=64,head_dim=8"
    flags = ["--config_overrides", shape, "--tokenizer", "byte", "--max_length", "128"]
    flags += ["--max_steps", "100", "--eval_dataset", str(conversations)]
    train(FINETUNE, folder, conversations, *flags)
    return folder / "model"


def train(recipe: str, folder: Path, dataset: Path, *flags: str) -> None:
    command = [*PYTHON, recipe, *flags, "--dataset", str(dataset), "--report_to", "none"]
    run_forked([*command, "--output_dir", str(folder)]).assert_ok()


def chats(grpo: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Return each question of the script with its answer."""
    return [
        [*row["prompt"], {"role": "assistant", "content": row["capital"]}]
        for row in grpo["questions"]()
    ]


def watch_generation(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list that gets the prompts and the results of each call of ``generate``."""
    calls: list[tuple[Any, Any]] = []
    generate = trainer.model.generate

    def recorded(input_ids: Any, **options: Any) -> Any:
        output = generate(input_ids=input_ids, **options)
        calls.append((input_ids, output))
        return output

    monkeypatch.setattr(trainer.model, "generate", recorded)
    return calls


def test_the_code_of_the_page_stands_in_the_script() -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert block in SCRIPT.read_text(), block


def test_grpo_begins_with_the_model_the_tokens_and_the_stops_of_the_run(
    finished: Path,
    grpo: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    saved = tmp_path / "grpo"
    # The answers must differ: without it, no reward is above the mean, and nothing is learnt.
    flags = ["--model", str(finished), "--output_dir", str(saved), "--temperature", "2"]
    trainer = grpo["make_trainer"](flags)

    # The rows of the run, made again from its flags: the prompts that GRPO makes, with the answers.
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 128)
    set_template(tokenizer, None)
    answers = {}
    nll = 0.0
    for chat in chats(grpo):
        (row,) = Renderer(tokenizer)(Conversation(chat, None)).sequences
        ids = torch.tensor(row.ids.tolist())
        targets = torch.tensor(row.loss_mask.tolist())
        answers[tuple(ids[~targets].tolist())] = ids[targets].tolist()
        with torch.no_grad():
            logits = trainer.model(ids[None]).logits[0, :-1][targets[1:]]
        nll += float(F.cross_entropy(logits, ids[targets], reduction="sum"))

    # The model is the one that the run evaluated at its end.
    targets_in_all = sum(len(answer) for answer in answers.values())
    losses = series(finished.parent, "eval/loss")
    assert nll / targets_in_all == pytest.approx(losses[max(losses)], rel=1e-5)
    ours = TextModel(str(finished))
    (end,) = {answer[-1] for answer in answers.values()}
    assert end != ours.tokenizer.eos_token_id
    assert set(trainer.eos_token_ids) == ours.stop_token_ids == {end, ours.tokenizer.eos_token_id}
    pad = trainer.processing_class.pad_token_id
    assert pad is not None
    assert trainer.model.config.pad_token_id == pad

    calls = watch_generation(trainer, monkeypatch)
    trainer.train()
    trainer.save_model()
    assert len(calls) == 2
    ended = 0
    for prompts, outputs in calls:
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
            answer = output[len(prompt) :]
            question = tuple(prompt[next(i for i, token in enumerate(prompt) if token != pad) :])
            assert question in answers
            if end in answer:
                ended += 1
                assert set(answer[answer.index(end) + 1 :]) <= {pad}
    assert ended >= 4, "half of the answers, at least"

    # What TRL has saved is read here, with the same tokens and stops.
    theirs = TextModel(str(saved))
    assert theirs.stop_token_ids == ours.stop_token_ids
    assert theirs.tokenizer.chat_template == ours.tokenizer.chat_template
    assert theirs.chat_prompt(chats(grpo)[0][:1]) in [list(question) for question in answers]
    before = ours.model.state_dict()
    after = theirs.model.state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)

    assert accuracy(saved, grpo, tmp_path) == expected_accuracy(theirs, grpo) > 0.25
    capsys.readouterr()  # the log of the trainer
    main(["generate", str(saved), "--prompt", "What", "--max_new_tokens", "3"])
    assert capsys.readouterr().out.startswith("What")


def accuracy(model: Path, grpo: dict[str, Any], folder: Path) -> float:
    """Return the accuracy of ``llmtrain eval``: which capital is the likeliest answer."""
    capitals = list(grpo["CAPITALS"].values())
    questions = [
        {"question": chat[0]["content"], "choices": capitals, "answer": i}
        for i, chat in enumerate(chats(grpo))
    ]
    (folder / "capitals.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "capitals.yaml").write_text(TASK.format(data=folder / "capitals.jsonl"))
    command = [*PYTHON, "llmtrain/__main__.py", "eval", str(model), "--tasks", "capitals"]
    flags = ["--include_path", str(folder), "--apply_chat_template", "--json"]
    ended = run_forked([*command, *flags], timeout=240).assert_ok()
    (result,) = json.loads(ended.out)
    return float(result["value"])


def expected_accuracy(model: TextModel, grpo: dict[str, Any]) -> float:
    """Return in how many questions the right capital has the largest probability."""
    capitals = list(grpo["CAPITALS"].values())

    def likelihood(prompt: list[int], capital: str) -> float:
        answer = model.tokenizer.encode(capital)
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return -float(F.cross_entropy(logits, torch.tensor(answer), reduction="sum"))

    right = 0
    for i, chat in enumerate(chats(grpo)):
        prompt = model.chat_prompt(chat[:1])
        scores = [likelihood(prompt, capital) for capital in capitals]
        right += scores.index(max(scores)) == i
    return right / len(capitals)


@long_form
def test_a_lora_run_is_handed_over_merged_or_through_peft_and_comes_back(
    finished: Path, conversations: Path, grpo: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    trl = pytest.importorskip("trl")
    flags = ["--model_name_or_path", str(finished), "--lora_r", "4", "--max_steps", "2"]
    train(FINETUNE, tmp_path / "lora", conversations, *flags)
    adapter = tmp_path / "lora" / "model"
    merged = tmp_path / "merged"
    main(["export", str(tmp_path / "lora"), "--merge", "--to", str(merged)])

    trainer = grpo["make_trainer"](
        ["--model", str(merged), "--output_dir", str(tmp_path / "grpo"), "--learning_rate", "1e-3"]
    )
    ids = torch.tensor([TextModel(str(adapter)).chat_prompt(chats(grpo)[0][:1])])
    with torch.no_grad():
        expected = TextModel(str(adapter)).model(ids).logits
        assert (trainer.model(ids).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    trainer.train()
    trainer.save_model()

    pairs = write_pairs(tmp_path / "pairs.jsonl")
    start = [
        "--model_name_or_path",
        str(tmp_path / "grpo"),
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
    ]
    train(PREFERENCE, tmp_path / "dpo", pairs, *start, "--max_length", "128")
    assert len(series(tmp_path / "dpo", "train/loss")) == 2

    # TRL trains the adapter itself, and saves an adapter.
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("runs/finetune-lora/model", str(adapter)), names)
    trainer = trl.GRPOTrainer(
        model=names["model"],
        processing_class=names["tokenizer"],
        reward_funcs=grpo["short_and_right"],
        train_dataset=grpo["questions"](),
        args=trainer.args,
    )
    assert set(trainer.eos_token_ids) == TextModel(str(adapter)).stop_token_ids
    with torch.no_grad():
        assert torch.equal(trainer.model(ids).logits, expected)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    settings = tmp_path / "adapter" / "generation_config.json"
    assert not settings.exists()
    shutil.copy(adapter / "generation_config.json", settings)
    end = str(tmp_path / "end")
    main(["export", str(tmp_path / "adapter"), "--merge", "--check", "--to", end])
    assert TextModel(end).stop_token_ids == TextModel(str(merged)).stop_token_ids
    assert TextModel(end).tokenizer.chat_template == TextModel(str(merged)).tokenizer.chat_template
