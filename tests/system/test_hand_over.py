"""docs/guides/hand-over.md: TRL trains a finished model further, and llmtrain reads the result."""

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation
from llmtrain.data.prompts import Prompts
from llmtrain.data.render import Renderer
from llmtrain.models.generation import TextModel
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    PREFERENCE,
    PYTHON,
    ROOT,
    SMALL_SIZE,
    long_form,
    series,
    write_pairs,
)

# TRL 1.16 calls transformers 5.23 by names that it is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE = ROOT / "docs" / "guides" / "hand-over.md"
SCRIPT = ROOT / "docs" / "migrate" / "trl_grpo.py"

Chat = list[dict[str, str]]
Script = dict[str, Any]


def test_the_code_of_the_page_is_in_the_script() -> None:
    blocks = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert block in SCRIPT.read_text(), block


# --- the model that is handed over


@contextmanager
def first_trainer_of_a_process() -> Iterator[None]:
    """Let a trainer begin and end without the state of another one."""

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield
    reset()


@pytest.fixture(scope="module")
def script() -> Script:
    """The names in the script of the page."""
    pytest.importorskip("trl", reason="needs trl, which comes with the extra dev")
    return runpy.run_path(str(SCRIPT))


def chats_of(script: Script) -> list[Chat]:
    """Return each question of the script with its answer."""
    chats = []
    for row in script["questions"]():
        answer = {"role": "assistant", "content": row["capital"]}
        chats.append([*row["prompt"], answer])
    return chats


def train(recipe: str, flags: str) -> None:
    run_forked([*PYTHON, recipe, *shlex.split(flags), "--report_to", "none"]).assert_ok()


@pytest.fixture(scope="module")
def conversations(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the questions and answers of the script."""
    path = tmp_path_factory.mktemp("capitals") / "chats.jsonl"
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats_of(script)]
    path.write_text("".join(lines * 8))
    return path


@pytest.fixture(scope="module")
def finished(conversations: Path) -> Path:
    """Train a model until it answers the questions, and ends its answers."""
    folder = conversations.with_name("run")
    train(
        FINETUNE,
        f"--config_overrides {SMALL_SIZE} --tokenizer byte --max_length 128 --max_steps 100 "
        f"--dataset {conversations} --eval_dataset {conversations} --output_dir {folder}",
    )
    return folder / "model"


def answers_by_prompt(script: Script) -> dict[tuple[int, ...], list[int]]:
    """Return the token ids of the run's rows: each prompt, with its answer."""
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 128)
    set_template(tokenizer, None)
    render = Renderer(tokenizer)
    answers = {}
    for chat in chats_of(script):
        [row] = render(Conversation(chat, None)).sequences
        token_ids = torch.tensor(row.ids.tolist())
        is_target = torch.tensor(row.loss_mask.tolist())
        prompt = tuple(token_ids[~is_target].tolist())
        answers[prompt] = token_ids[is_target].tolist()
    return answers


def answer_nll(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> float:
    """Return the negative log-likelihood of an answer."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits
    predictions = logits[0, len(prompt) - 1 : -1]
    return F.cross_entropy(predictions, torch.tensor(answer), reduction="sum").item()


# --- GRPO


@dataclass
class GrpoRun:
    """Two steps of GRPO, which begin with the finished model.

    Attributes:
        first_loss: nll per target token of the run's rows, before the first step.
        stop_token_ids: with which TRL ends an answer.
        pad_token_id: of TRL's tokenizer.
        model_pad_token_id: of TRL's model.
        generations: each prompt, padded on the left, with its answer, padded on the right.
        calls: the number of calls of `generate`.
        saved: the folder of the model after training.
    """

    first_loss: float
    stop_token_ids: set[int]
    pad_token_id: int
    model_pad_token_id: int
    generations: list[tuple[list[int], list[int]]]
    calls: int
    saved: Path


@pytest.fixture(scope="module")
def grpo_run(finished: Path, script: Script, tmp_path_factory: pytest.TempPathFactory) -> GrpoRun:
    folder = tmp_path_factory.mktemp("grpo") / "model"
    # At a temperature of 2, answers differ. Otherwise all rewards of a question were the same, and
    # the model would learn nothing.
    flags = shlex.split(f"--model {finished} --output_dir {folder} --temperature 2")
    with first_trainer_of_a_process():
        trainer = script["make_trainer"](flags)

        nll = 0.0
        targets = 0
        for prompt, answer in answers_by_prompt(script).items():
            nll += answer_nll(trainer.model, [*prompt], answer)
            targets += len(answer)

        calls = 0
        generations: list[tuple[list[int], list[int]]] = []
        generate = trainer.model.generate

        def recording_generate(input_ids: torch.Tensor, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            outputs = generate(input_ids=input_ids, **options)
            for prompt, output in zip(input_ids.tolist(), outputs.tolist(), strict=True):
                generations.append((prompt, output[len(prompt) :]))
            return outputs

        trainer.model.generate = recording_generate
        trainer.train()
        trainer.save_model()

    return GrpoRun(
        first_loss=nll / targets,
        stop_token_ids=set(trainer.eos_token_ids),
        pad_token_id=trainer.processing_class.pad_token_id,
        model_pad_token_id=trainer.model.config.pad_token_id,
        generations=generations,
        calls=calls,
        saved=folder,
    )


def test_grpo_begins_with_the_weights_of_the_run(grpo_run: GrpoRun, finished: Path) -> None:
    losses = series(finished.parent, "eval/loss")
    last_step = max(losses)
    assert grpo_run.first_loss == pytest.approx(losses[last_step], rel=1e-5)


def test_grpo_stops_at_the_stop_tokens_of_the_run(
    grpo_run: GrpoRun, finished: Path, script: Script
) -> None:
    text_model = TextModel(str(finished))
    last_tokens = {answer[-1] for answer in answers_by_prompt(script).values()}
    end_of_text = text_model.tokenizer.eos_token_id

    assert end_of_text not in last_tokens
    assert grpo_run.stop_token_ids == last_tokens | {end_of_text}
    assert text_model.stop_token_ids == grpo_run.stop_token_ids
    assert grpo_run.pad_token_id is not None
    assert grpo_run.model_pad_token_id == grpo_run.pad_token_id


def test_grpo_has_the_prompts_of_the_run_and_its_answers_end(
    grpo_run: GrpoRun, script: Script
) -> None:
    answers = answers_by_prompt(script)
    [end_of_turn] = {answer[-1] for answer in answers.values()}
    pad = grpo_run.pad_token_id
    assert grpo_run.calls == 2

    ended_answers = 0
    for padded_prompt, answer in grpo_run.generations:
        padding = next(i for i, token in enumerate(padded_prompt) if token != pad)
        assert tuple(padded_prompt[padding:]) in answers
        if end_of_turn in answer:
            ended_answers += 1
            after_end = answer[answer.index(end_of_turn) + 1 :]
            assert set(after_end) <= {pad}
    assert ended_answers >= 4, "half of the answers, at least"


def prompt_of(model: TextModel, question: list[Any]) -> list[int]:
    return Prompts(model.tokenizer, model.stop_token_ids).of_messages(question)


def test_the_model_that_trl_has_saved_has_the_tokens_and_stops_of_the_run(
    grpo_run: GrpoRun, finished: Path, script: Script
) -> None:
    before = TextModel(str(finished))
    after = TextModel(str(grpo_run.saved))

    assert after.stop_token_ids == before.stop_token_ids
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    question = chats_of(script)[0][:1]
    assert tuple(prompt_of(after, question)) in answers_by_prompt(script)

    weights_before = before.model.state_dict()
    weights_after = after.model.state_dict()
    assert weights_after.keys() == weights_before.keys()
    same_weights = [
        name for name in weights_before if torch.equal(weights_after[name], weights_before[name])
    ]
    assert len(same_weights) < len(weights_before), "GRPO has trained"


def test_llmtrain_evaluates_the_model_that_trl_has_saved(
    grpo_run: GrpoRun,
    conversations: Path,
    script: Script,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(grpo_run.saved).eval()
    answers = answers_by_prompt(script)
    nll = sum(answer_nll(model, [*prompt], answer) for prompt, answer in answers.items())

    capsys.readouterr()
    main(shlex.split(f"eval {grpo_run.saved} --dataset {conversations} --json"))

    loss = json.loads(capsys.readouterr().out)["loss"]
    assert loss == pytest.approx(nll / sum(map(len, answers.values())), rel=1e-5)


def test_llmtrain_generates_with_the_model_that_trl_has_saved(
    grpo_run: GrpoRun, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(f"generate {grpo_run.saved} --prompt What --max_new_tokens 3"))
    assert capsys.readouterr().out.startswith("What")


# --- adapters


@pytest.fixture(scope="module")
def adapter(finished: Path, conversations: Path) -> Path:
    """Train an adapter of the finished model."""
    folder = finished.parent.with_name("lora")
    train(
        FINETUNE,
        f"--model_name_or_path {finished} --lora_r 4 --max_steps 2 --dataset {conversations} "
        f"--output_dir {folder}",
    )
    return folder / "model"


@pytest.fixture(scope="module")
def merged(adapter: Path) -> Path:
    """Merge the adapter into its base."""
    folder = adapter.parent.with_name("merged")
    main(shlex.split(f"export {adapter.parent} --merge --to {folder}"))
    return folder


@pytest.fixture
def first_prompt(adapter: Path, script: Script) -> torch.Tensor:
    question = chats_of(script)[0][:1]
    return torch.tensor([prompt_of(TextModel(str(adapter)), question)])


@long_form
def test_trl_trains_a_merged_adapter_and_llmtrain_continues(
    adapter: Path, merged: Path, first_prompt: torch.Tensor, script: Script, tmp_path: Path
) -> None:
    flags = f"--model {merged} --output_dir {tmp_path}/grpo --learning_rate 1e-3"
    with first_trainer_of_a_process():
        trainer = script["make_trainer"](shlex.split(flags))
        with torch.no_grad():
            logits = trainer.model(first_prompt).logits
            expected = TextModel(str(adapter)).model(first_prompt).logits
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
        trainer.train()
        trainer.save_model()

    pairs = write_pairs(tmp_path / "pairs.jsonl")
    train(
        PREFERENCE,
        f"--model_name_or_path {tmp_path}/grpo --max_steps 2 --logging_steps 1 --max_length 128 "
        f"--dataset {pairs} --output_dir {tmp_path}/dpo",
    )
    assert len(series(tmp_path / "dpo", "train/loss")) == 2


@long_form
def test_trl_trains_an_adapter_through_peft_and_llmtrain_merges_it(
    adapter: Path, merged: Path, first_prompt: torch.Tensor, script: Script, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    trl = pytest.importorskip("trl")
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("runs/finetune-lora/model", str(adapter)), names)

    flags = f"--model {merged} --output_dir {tmp_path}/grpo --learning_rate 1e-3"
    with first_trainer_of_a_process():
        arguments = script["make_trainer"](shlex.split(flags)).args
        trainer = trl.GRPOTrainer(
            model=names["model"],
            processing_class=names["tokenizer"],
            reward_funcs=script["short_and_right"],
            train_dataset=script["questions"](),
            args=arguments,
        )
        assert set(trainer.eos_token_ids) == TextModel(str(adapter)).stop_token_ids
        with torch.no_grad():
            logits = trainer.model(first_prompt).logits
            assert torch.equal(logits, TextModel(str(adapter)).model(first_prompt).logits)
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))

    # TRL does not save the settings of generation, so the page copies them.
    settings = tmp_path / "adapter" / "generation_config.json"
    assert not settings.exists()
    shutil.copy(adapter / "generation_config.json", settings)
    main(shlex.split(f"export {tmp_path}/adapter --merge --check --to {tmp_path}/exported"))

    exported = TextModel(str(tmp_path / "exported"))
    original = TextModel(str(merged))
    assert exported.stop_token_ids == original.stop_token_ids
    assert exported.tokenizer.chat_template == original.tokenizer.chat_template
