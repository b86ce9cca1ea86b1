"""A finished model has the dtype of its base, or the one that the user names, and says what that costs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError
from llmtrain.record.history import read_lines
from llmtrain.training.run import Run
from recipes import finetune
from tests.launching import read_json
from tests.models.small_models import tiny_llama

KEPT_WIDE = "model.layers.1.input_layernorm.weight"  # stands for a routing bias


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of one small model, stored in each dtype, or with other weights."""
    config = tiny_llama()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)

    def base(dtype: str, **changed: torch.Tensor) -> Path:
        folder = tmp_path_factory.mktemp(dtype)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        model.float()
        words.save_pretrained(folder)
        weights = weights_of(folder)
        for name, weight in changed.items():
            weights[name.replace("__", ".")] = weight
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return base


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """Fine-tune a base for four steps, in the folder ``run``."""

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n} are {2 * n}.\n" for n in range(99)))

    def train(base: Path, *flags: str) -> Run:
        argv = ["--model_name_or_path", str(base), "--dataset", str(text)]
        argv += ["--max_length", "32", "--max_steps", "4", "--eval_steps", "2"]
        argv += ["--global_batch_size", "4", "--warmup_steps", "0", "--eval_fraction", "0.2"]
        argv += ["--report_to", "none", "--output_dir", str(tmp_path / "run")]
        return finetune.main([*argv, *flags])

    return train


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def logits(folder: Path, **options: object) -> torch.Tensor:
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **options)(ids).logits.float()


@pytest.mark.parametrize(
    ("base", "flag", "dtype"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_a_finished_model_has_the_dtype_of_its_base_or_the_chosen_one(
    bases: Callable[..., Path],
    train: Callable[..., Run],
    base: str,
    flag: str,
    dtype: torch.dtype,
) -> None:
    run = train(bases(base), "--save_dtype", flag)
    trained = run.folder / "checkpoints" / "step-00000004" / "model"
    finished = run.folder / "model"

    for name, weight in weights_of(trained).items():
        assert weight.dtype == torch.float32
        assert weights_of(finished)[name].dtype == dtype
        assert torch.equal(weights_of(finished)[name], weight.to(dtype))
    assert read_json(trained / "config.json")["dtype"] == "float32"
    assert read_json(finished / "config.json")["dtype"] == str(dtype).removeprefix("torch.")

    # Stock transformers loads this dtype without arguments, and computes almost the same.
    assert AutoModelForCausalLM.from_pretrained(finished).dtype == dtype
    exact = logits(trained)
    bound = max(1e-5, 16 * torch.finfo(dtype).eps / 2)  # as in `llmtrain export --check`
    assert (logits(finished, dtype=torch.float32) - exact).abs().max() <= bound * exact.abs().max()
    assert (logits(finished) - exact).abs().max() <= 2 * bound * exact.abs().max()


def test_a_tensor_that_the_base_keeps_in_another_dtype_stays_in_it(
    bases: Callable[..., Path], train: Callable[..., Run]
) -> None:
    base = bases("bfloat16", **{KEPT_WIDE.replace(".", "__"): torch.ones(32)})
    finished = weights_of(train(base).folder / "model")
    assert {n for n, weight in finished.items() if weight.dtype == torch.float32} == {KEPT_WIDE}


def test_the_eval_loss_of_the_rounded_model_is_logged_beside_the_last_one(
    bases: Callable[..., Path], train: Callable[..., Run], capsys: pytest.CaptureFixture
) -> None:
    run = train(bases("bfloat16"))
    entries = read_lines(run.folder / "metrics.jsonl")
    (last,) = [e["eval/loss"] for e in entries if e["step"] == 4 and "eval/loss" in e]
    (rounded,) = [e["eval/rounded_loss"] for e in entries if "eval/rounded_loss" in e]
    assert rounded != last
    assert rounded == pytest.approx(last, rel=1e-3)

    line = f"eval loss {rounded:.4f} in bfloat16 ({last:.4f} before rounding)"
    (event,) = read_lines(run.folder / "events.jsonl")
    assert event["text"] == line
    assert f"rounded   {line}" in capsys.readouterr().out

    # A run that starts from the folder begins with this loss, to the last bit.
    again = train(run.folder / "model", "--resume_from_checkpoint", "never", "--max_steps", "1")
    entries = read_lines(again.folder / "metrics.jsonl")
    (first,) = [e["eval/loss"] for e in entries if e["step"] == 0 and "eval/loss" in e]
    assert first == rounded


def test_a_model_that_is_not_rounded_is_not_evaluated_again(
    bases: Callable[..., Path], train: Callable[..., Run]
) -> None:
    run = train(bases("float32"))
    entries = read_lines(run.folder / "metrics.jsonl")
    assert not any("eval/rounded_loss" in entry for entry in entries)
    assert not (run.folder / "events.jsonl").exists()
    assert {w.dtype for w in weights_of(run.folder / "model").values()} == {torch.float32}


def test_the_best_weights_are_rounded_and_compared_with_their_own_loss(
    bases: Callable[..., Path], train: Callable[..., Run]
) -> None:
    # With this learning rate, the loss only grows.
    flags = ["--load_best_model_at_end", "--eval_steps", "1", "--learning_rate", "1"]
    run = train(bases("bfloat16"), *flags, "--lr_scheduler_type", "constant")
    best = run.patience.best_step
    assert best < 4
    finished = weights_of(run.folder / "model")
    for name, weight in weights_of(
        run.folder / "checkpoints" / f"step-{best:08}" / "model"
    ).items():
        assert torch.equal(finished[name], weight.to(torch.bfloat16))

    entries = read_lines(run.folder / "metrics.jsonl")
    (loss,) = [e["eval/loss"] for e in entries if e["step"] == best and "eval/loss" in e]
    event = read_lines(run.folder / "events.jsonl")[-1]
    assert event["text"].endswith(f"({loss:.4f} before rounding)")


def test_weights_beyond_a_dtype_are_one_line_and_the_run_ends_with_another_dtype(
    bases: Callable[..., Path], train: Callable[..., Run], tmp_path: Path
) -> None:
    base = bases("float32", model__norm__weight=torch.full((32,), 1e5))
    with pytest.raises(UserError) as error:
        train(base, "--save_dtype", "float16")
    message = str(error.value)
    assert message.startswith("model.norm.weight has values above 65504, the largest of float16")
    assert "--save_dtype bfloat16" in message
    assert not (tmp_path / "run" / "model").exists()

    run = train(base, "--save_dtype", "bfloat16")
    assert run.folder == tmp_path / "run"
    assert run.resume_point.step == 4
    assert {w.dtype for w in weights_of(run.folder / "model").values()} == {torch.bfloat16}
    # The evaluation after the last step was made by the start that failed.
    event = read_lines(run.folder / "events.jsonl")[-1]
    assert event["text"].endswith(" before rounding)")


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("auto", torch.float32), ("float16", torch.float16)],
    ids=["auto", "float16"],
)
def test_an_adapter_is_float32_unless_another_dtype_is_chosen(
    bases: Callable[..., Path], train: Callable[..., Run], flag: str, dtype: torch.dtype
) -> None:
    run = train(bases("bfloat16"), "--lora_r", "2", "--save_dtype", flag)
    adapter = load_file(run.folder / "model" / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {dtype}
    assert (run.folder / "events.jsonl").exists() == (flag == "float16")
