"""A run that no longer improves ends early with its best weights, on any layout, also if interrupted."""

import random
import shlex
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SIX_STEPS,
    TINY,
    interrupt,
    long_form,
    read_json,
    series,
    torchrun,
    write_chats,
)

EVAL_STEPS = 4
PATIENCE = 3  # evaluations
MAX_STEPS = 400
EARLY_STOPPING = [
    *TINY,
    *shlex.split(
        f"--max_steps {MAX_STEPS} --eval_steps {EVAL_STEPS} --save_steps 6 --eval_fraction 0.3 "
        f"--learning_rate 2e-2 --early_stopping_patience {PATIENCE}"
    ),
]


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of random letters. A model overfits soon after it has learnt their frequencies."""
    path = tmp_path_factory.mktemp("noise") / "noise.txt"
    path.write_text("".join(random.Random(0).choices("abcdefgh", k=1500)))
    return path


def early_stopping_command(dataset: Path, folder: Path, launcher: list[str] = PYTHON) -> list[str]:
    flags = shlex.split(f"--dataset {dataset} --output_dir {folder}")
    return [*launcher, GPT, *EARLY_STOPPING, *flags]


@pytest.fixture(scope="module")
def reference(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process, without an interruption."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run_forked(early_stopping_command(noise, folder)).assert_ok()
    return folder


def status_of(folder: Path) -> dict[str, object]:
    return read_json(folder / "status.json")


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def have_same_weights(first: Path, second: Path) -> bool:
    first_weights = weights_of(first)
    second_weights = weights_of(second)
    if first_weights.keys() != second_weights.keys():
        return False
    return all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


def best_step_of(folder: Path) -> int:
    """Return the step of the lowest eval loss. The evaluation before the first step does not count."""
    losses = series(folder, "eval/loss")
    del losses[0]
    return min(losses, key=lambda step: (losses[step], step))


def checkpoint_model(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "model"


# --- early stopping


def test_a_run_ends_when_its_patience_is_over(reference: Path) -> None:
    best_step = best_step_of(reference)
    last_step = max(series(reference, "eval/loss"))
    assert last_step == best_step + PATIENCE * EVAL_STEPS
    assert last_step < MAX_STEPS

    status = status_of(reference)
    assert status["state"] == "finished"
    assert status["step"] == last_step
    reason = f"eval/loss has not improved in 3 evaluations since step {best_step}"
    assert status["reason"] == reason


def test_the_model_of_a_run_has_the_best_weights(reference: Path) -> None:
    best_model = checkpoint_model(reference, best_step_of(reference))
    other_models = [*reference.glob("checkpoints/*/model")]
    other_models.remove(best_model)

    assert have_same_weights(reference / "model", best_model)
    assert other_models
    for model in other_models:
        assert not have_same_weights(reference / "model", model)


def test_two_processes_stop_at_the_same_step(reference: Path, noise: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_forked(early_stopping_command(noise, folder, launcher=torchrun(2))).assert_ok()

    assert best_step_of(folder) == best_step_of(reference)
    assert status_of(folder)["step"] == status_of(reference)["step"]
    expected = weights_of(reference / "model")
    for name, tensor in weights_of(folder / "model").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_an_interrupted_run_stops_at_the_same_step_with_the_same_bits(
    reference: Path, noise: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = early_stopping_command(noise, folder)
    log_entries = best_step_of(reference) + 2

    ended = interrupt(command, folder, signal.SIGINT, log_entries)
    assert ended.status == 128 + signal.SIGINT
    assert status_of(folder)["state"] == "preempted"
    run_forked(command).assert_ok()

    assert status_of(folder)["step"] == status_of(reference)["step"]
    assert have_same_weights(folder / "model", reference / "model")


def test_another_patience_is_another_run(reference: Path, noise: Path) -> None:
    command = early_stopping_command(noise, reference)
    ended = run_forked([*command, "--early_stopping_patience", "1"]).assert_ok()
    assert f"run       {reference}-2" in ended.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            "--metric_for_best_model eval/accuracy",
            "is not measured; choose one of eval/loss, eval/perplexity",
            id="unknown metric",
        ),
        pytest.param("--eval_fraction 0", "needs eval rows", id="no eval rows"),
        pytest.param(
            "--eval_steps 0", "needs evaluations; set --eval_steps above 0", id="no evaluations"
        ),
        pytest.param(
            "--early_stopping_patience 0 --load_best_model_at_end --eval_steps 0",
            "--load_best_model_at_end needs evaluations",
            id="best model without evaluations",
        ),
        pytest.param(
            "--early_stopping_patience 0 --sample_prompts The --eval_steps 0",
            "--sample_prompts needs evaluations",
            id="samples without evaluations",
        ),
        pytest.param(
            "--early_stopping_patience 0 --load_best_model_at_end --eval_fraction 0",
            "--load_best_model_at_end needs eval rows",
            id="best model without eval rows",
        ),
        pytest.param(
            "--early_stopping_patience 0 --metric_for_best_model eval/perplexity",
            "has no effect without --early_stopping_patience",
            id="metric without use",
        ),
    ],
)
def test_flags_that_exclude_each_other_are_an_error_of_one_line(
    flags: str, message: str, noise: Path, tmp_path: Path
) -> None:
    command = early_stopping_command(noise, tmp_path / "run")

    ended = run_forked([*command, *shlex.split(flags)])

    assert ended.status != 0
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert message in line


# --- the best weights without early stopping


@long_form
def test_load_best_model_at_end_takes_the_best_weights_also_after_a_resume(
    noise: Path, tmp_path: Path
) -> None:
    flags = shlex.split(
        "--max_steps 48 --eval_steps 4 --save_steps 6 --eval_fraction 0.3 --learning_rate 2e-2 "
        f"--load_best_model_at_end --lr_scheduler_type constant --dataset {noise}"
    )
    command = [*PYTHON, GPT, *TINY, *flags, "--output_dir"]
    folder = tmp_path / "run"
    run_forked([*command, str(folder)]).assert_ok()

    best_step = best_step_of(folder)
    assert status_of(folder)["step"] == 48
    assert best_step < 48
    assert have_same_weights(folder / "model", checkpoint_model(folder, best_step))
    assert not have_same_weights(folder / "model", checkpoint_model(folder, 48))

    resumed = tmp_path / "resumed"
    resumed_command = [*command, str(resumed)]
    # A log entry for each step, and one for each evaluation.
    log_entries = best_step + best_step // 4 + 3
    interrupt(resumed_command, resumed, signal.SIGTERM, log_entries)
    interrupted_step = status_of(resumed)["step"]
    assert best_step < interrupted_step < 48

    ended = run_forked(resumed_command).assert_ok()

    assert f"model/ has the weights of step {best_step}: the best eval/loss" in ended.out
    assert have_same_weights(resumed / "model", folder / "model")


def test_the_best_weights_are_chosen_by_the_metric_of_the_user(noise: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(
        "--max_steps 8 --eval_steps 0.5 --eval_fraction 0.3 --load_best_model_at_end "
        f"--metric_for_best_model eval/perplexity --dataset {noise} --output_dir {folder}"
    )

    run_forked([*PYTHON, GPT, *TINY, *flags]).assert_ok()

    perplexities = series(folder, "eval/perplexity")
    del perplexities[0]
    best_step = min(perplexities, key=perplexities.__getitem__)
    state = read_json(folder / "checkpoints" / "step-00000008" / "state.json")
    assert state["best"][:2] == [perplexities[best_step], best_step]
    # A run with another metric is another run.
    assert state["fingerprint"]["early_stopping"] == [0, "eval/perplexity", 4]


# --- several sources


def test_each_source_has_an_eval_loss_and_their_mean_does_not_depend_on_the_layout(
    tmp_path: Path,
) -> None:
    long_source = write_chats(tmp_path / "long.jsonl", 40, seed=40)
    short_source = write_chats(tmp_path / "short.jsonl", 13, seed=13)
    size = "hidden_size=32,num_hidden_layers=2,intermediate_size=64"
    flags = shlex.split(
        f"--from_config llama --config_overrides {size} --block_size 64 --tokenizer byte "
        f"--eval_fraction 0.4 --dataset {long_source} {short_source}"
    )
    command = [FINETUNE, *SIX_STEPS, *flags, "--output_dir"]
    on_one = tmp_path / "on-one"
    on_two = tmp_path / "on-two"
    run_forked([*PYTHON, *command, str(on_one)]).assert_ok()
    run_forked([*torchrun(2), *command, str(on_two)]).assert_ok()

    losses = series(on_one, "eval/loss")
    losses_of_long = series(on_one, "eval/loss/long")
    losses_of_short = series(on_one, "eval/loss/short")
    assert losses.keys() == losses_of_long.keys() == losses_of_short.keys()
    for step, loss in losses.items():
        lower, higher = sorted([losses_of_long[step], losses_of_short[step]])
        assert lower < loss < higher

    for key in ("eval/loss", "eval/loss/long", "eval/loss/short"):
        assert series(on_two, key) == pytest.approx(series(on_one, key), rel=1e-4)
