"""docs/guides/from-trl.md: TRL trains a finished model further, and llmtrain reads the result."""

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
from llmtrain.data.formats import Conversation
from llmtrain.data.render import Renderer
from llmtrain.data.tokenizer import set_template
from llmtrain.models.generation import TextModel
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, ROOT, SMALL_SIZE, long_form, series

# TRL 1.16 calls transformers 5.23 by names that it is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PAGE = ROOT / "docs" / "guides" / "from-trl.md"
SCRIPT = ROOT / "docs" / "migrate" / "trl_grpo.py"

Script = dict[str, Any]
# The token ids of each prompt, with those of its answer.
Answers = dict[tuple[int, ...], list[int]]


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


@pytest.fixture(scope="module")
def conversations(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the questions and answers of the script, eight times."""
    lines = []
    for row in script["questions"]():
        answer = {"role": "assistant", "content": row["capital"]}
        lines.append(json.dumps({"messages": [*row["prompt"], answer]}) + "\n")
    path = tmp_path_factory.mktemp("capitals") / "chats.jsonl"
    path.write_text("".join(lines * 8))
    return path


@pytest.fixture(scope="module")
def answers(conversations: Path) -> Answers:
    """The rows of the run."""
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 128)
    set_template(tokenizer, None)
    render = Renderer(tokenizer)
    answers = {}
    for line in conversations.read_text().splitlines():
        [row] = render(Conversation(json.loads(line)["messages"], None)).sequences
        token_ids = torch.tensor(row.ids.tolist())
        is_target = torch.tensor(row.loss_mask.tolist())
        answers[tuple(token_ids[~is_target].tolist())] = token_ids[is_target].tolist()
    return answers


@pytest.fixture(scope="module")
def finished(conversations: Path) -> Path:
    """Train a model until it answers the questions, and ends its answers."""
    folder = conversations.with_name("run")
    flags = shlex.split(
        f"--config_overrides {SMALL_SIZE} --tokenizer byte --max_length 128 --max_steps 100 "
        f"--dataset {conversations} --eval_dataset {conversations} --report_to none "
        f"--output_dir {folder}"
    )
    run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()
    return folder / "model"


def loss_of(model: torch.nn.Module, answers: Answers) -> float:
    """Return the nll per target token."""
    nll = 0.0
    for prompt, answer in answers.items():
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits
        predictions = logits[0, len(prompt) - 1 : -1]
        nll += F.cross_entropy(predictions, torch.tensor(answer), reduction="sum").item()
    return nll / sum(map(len, answers.values()))


# --- GRPO


@dataclass
class GrpoRun:
    """Two steps of GRPO, which begin with the finished model.

    Attributes:
        trainer: TRL's trainer after them.
        first_loss: nll per target token of the run's rows, before the first step.
        generations: each prompt, padded on the left, with its answer, padded on the right.
        saved: the folder of the model after training.
    """

    trainer: Any
    first_loss: float
    generations: list[tuple[list[int], list[int]]]
    saved: Path


@pytest.fixture(scope="module")
def grpo_run(
    finished: Path, script: Script, answers: Answers, tmp_path_factory: pytest.TempPathFactory
) -> GrpoRun:
    folder = tmp_path_factory.mktemp("grpo") / "model"
    # At a temperature of 2, answers differ. Otherwise all rewards of a question were the same, and
    # the model would learn nothing.
    flags = shlex.split(f"--model {finished} --output_dir {folder} --temperature 2")
    with first_trainer_of_a_process():
        trainer = script["make_trainer"](flags)
        first_loss = loss_of(trainer.model, answers)

        generations: list[tuple[list[int], list[int]]] = []
        generate = trainer.model.generate

        def recording_generate(input_ids: torch.Tensor, **options: Any) -> Any:
            outputs = generate(input_ids=input_ids, **options)
            for prompt, output in zip(input_ids.tolist(), outputs.tolist(), strict=True):
                generations.append((prompt, output[len(prompt) :]))
            return outputs

        trainer.model.generate = recording_generate
        trainer.train()
        trainer.save_model()

    return GrpoRun(trainer, first_loss, generations, folder)


@long_form
def test_grpo_begins_with_the_weights_and_the_stop_tokens_of_the_run(
    grpo_run: GrpoRun, finished: Path, answers: Answers
) -> None:
    losses = series(finished.parent, "eval/loss")
    assert grpo_run.first_loss == pytest.approx(losses[max(losses)], rel=1e-5)

    text_model = TextModel(str(finished))
    last_tokens = {answer[-1] for answer in answers.values()}
    assert set(grpo_run.trainer.eos_token_ids) == text_model.stop_token_ids
    assert text_model.stop_token_ids == last_tokens | {text_model.tokenizer.eos_token_id}


@long_form
def test_grpo_has_the_prompts_of_the_run_and_its_answers_end(
    grpo_run: GrpoRun, answers: Answers
) -> None:
    [end_of_turn] = {answer[-1] for answer in answers.values()}
    pad = grpo_run.trainer.processing_class.pad_token_id
    assert grpo_run.trainer.model.config.pad_token_id == pad

    ended_answers = 0
    for padded_prompt, answer in grpo_run.generations:
        padding = next(i for i, token in enumerate(padded_prompt) if token != pad)
        assert tuple(padded_prompt[padding:]) in answers
        if end_of_turn in answer:
            ended_answers += 1
            after_end = answer[answer.index(end_of_turn) + 1 :]
            assert set(after_end) <= {pad}
    assert ended_answers >= 4, "half of the answers, at least"


@long_form
def test_llmtrain_reads_the_model_that_trl_has_saved(
    grpo_run: GrpoRun,
    finished: Path,
    conversations: Path,
    answers: Answers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = TextModel(str(finished))
    after = TextModel(str(grpo_run.saved))
    assert after.stop_token_ids == before.stop_token_ids
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    weights = before.model.state_dict()
    assert not all(
        torch.equal(tensor, weights[name]) for name, tensor in after.model.state_dict().items()
    ), "GRPO has trained"

    capsys.readouterr()
    main(shlex.split(f"eval {grpo_run.saved} --dataset {conversations} --json"))

    loss = json.loads(capsys.readouterr().out)["loss"]
    model = AutoModelForCausalLM.from_pretrained(grpo_run.saved).eval()
    assert loss == pytest.approx(loss_of(model, answers), rel=1e-5)


# --- adapters


@long_form
def test_trl_trains_an_adapter_through_peft_and_llmtrain_merges_it(
    finished: Path, conversations: Path, answers: Answers, script: Script, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    adapter = tmp_path / "lora" / "model"
    flags = shlex.split(
        f"--model_name_or_path {finished} --lora_r 4 --max_steps 2 --dataset {conversations} "
        f"--report_to none --output_dir {tmp_path}/lora"
    )
    run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()
    original = TextModel(str(adapter))
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("runs/finetune-lora/model", str(adapter)), names)

    grpo_flags = f"--model {finished} --output_dir {tmp_path}/grpo --learning_rate 1e-3"
    with first_trainer_of_a_process():
        trainer = trl.GRPOTrainer(
            model=names["model"],
            processing_class=names["tokenizer"],
            reward_funcs=script["short_and_right"],
            train_dataset=script["questions"](),
            args=script["make_trainer"](shlex.split(grpo_flags)).args,
        )
        assert set(trainer.eos_token_ids) == original.stop_token_ids
        prompt = torch.tensor([next(iter(answers))])
        with torch.no_grad():
            assert torch.equal(trainer.model(prompt).logits, original.model(prompt).logits)
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))

    # TRL does not save the settings of generation, so the page copies them.
    settings = tmp_path / "adapter" / "generation_config.json"
    assert not settings.exists()
    shutil.copy(adapter / "generation_config.json", settings)
    main(shlex.split(f"export {tmp_path}/adapter --merge --to {tmp_path}/exported"))

    exported = TextModel(str(tmp_path / "exported"))
    assert exported.stop_token_ids == original.stop_token_ids
    assert exported.tokenizer.chat_template == original.tokenizer.chat_template
