"""A run that no longer improves ends early with its best weights, on any layout, also if interrupted."""

import random
import shlex
import signal
from pathlib import Path

import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.record.tensor_files import read_tensors
from recipes import gpt
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, interrupt, long_form, read_json, series, torchrun
from tests.system.digits import tensors_digest

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


def have_same_weights(first: Path, second: Path) -> bool:
    """Return whether two folders of models have the same bits."""
    digests = {tensors_digest(folder / "model.safetensors") for folder in (first, second)}
    return len(digests) == 1


def best_step_of(folder: Path) -> int:
    """Return the step of the lowest eval loss. The evaluation before the first step does not count."""
    losses = series(folder, "eval/loss")
    del losses[0]
    return min(losses, key=lambda step: (losses[step], step))


def checkpoint_model(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "model"


# --- early stopping


def test_a_run_ends_with_its_best_weights_when_its_patience_is_over(reference: Path) -> None:
    best_step = best_step_of(reference)
    last_step = max(series(reference, "eval/loss"))
    assert last_step == best_step + PATIENCE * EVAL_STEPS
    assert last_step < MAX_STEPS

    status = status_of(reference)
    assert (status["state"], status["step"]) == ("finished", last_step)
    reason = f"eval/loss has not improved in 3 evaluations since step {best_step}"
    assert status["reason"] == reason

    best_model = checkpoint_model(reference, best_step)
    for model in reference.glob("checkpoints/*/model"):
        assert have_same_weights(reference / "model", model) == (model == best_model)


def test_two_processes_stop_at_the_same_step(reference: Path, noise: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_forked(early_stopping_command(noise, folder, launcher=torchrun(2))).assert_ok()

    assert best_step_of(folder) == best_step_of(reference)
    assert status_of(folder)["step"] == status_of(reference)["step"]
    weights = dict(read_tensors(folder / "model"))
    expected = dict(read_tensors(reference / "model"))
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


@long_form
def test_an_interrupted_run_stops_at_the_same_step_with_the_same_bits(
    reference: Path, noise: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = early_stopping_command(noise, folder)

    ended = interrupt(command, folder, signal.SIGINT, best_step_of(reference) + 2)
    assert ended.status == 128 + signal.SIGINT
    assert status_of(folder)["state"] == "preempted"
    run_forked(command).assert_ok()

    assert status_of(folder)["step"] == status_of(reference)["step"]
    assert have_same_weights(folder / "model", reference / "model")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--early_stopping_patience 3 --metric_for_best_model eval/accuracy", "eval/accuracy"),
        ("--early_stopping_patience 3 --eval_steps 0", "--eval_steps"),
        ("--early_stopping_patience 3 --eval_fraction 0", "--early_stopping_patience"),
        ("--load_best_model_at_end --eval_fraction 0", "--load_best_model_at_end"),
        ("--sample_prompts The --eval_steps 0", "--sample_prompts"),
        ("--metric_for_best_model eval/perplexity", "--metric_for_best_model"),
    ],
)
def test_flags_that_exclude_each_other_are_named(
    flags: str, named: str, noise: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=named):
        gpt.main([*TINY, *shlex.split(f"--dataset {noise} --output_dir {folder} {flags}")])
    assert not (folder / "checkpoints").exists()


# --- the best weights without early stopping


def test_load_best_model_at_end_takes_the_best_weights_by_the_metric_of_the_user(
    noise: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(
        "--max_steps 48 --eval_steps 4 --save_steps 6 --eval_fraction 0.3 --learning_rate 2e-2 "
        "--load_best_model_at_end --metric_for_best_model eval/perplexity "
        f"--lr_scheduler_type constant --dataset {noise} --output_dir {folder}"
    )

    ended = run_forked([*PYTHON, GPT, *TINY, *flags]).assert_ok()

    best_step = best_step_of(folder)
    assert best_step < status_of(folder)["step"] == 48
    assert f"model/ has the weights of step {best_step}: the best eval/perplexity" in ended.out
    assert have_same_weights(folder / "model", checkpoint_model(folder, best_step))
    assert not have_same_weights(folder / "model", checkpoint_model(folder, 48))
    state = read_json(folder / "checkpoints" / "step-00000048" / "state.json")
    best = {"value": series(folder, "eval/perplexity")[best_step], "step": best_step}
    assert best.items() <= state["best"].items()
    # A run with another metric or patience is another run.
    assert state["fingerprint"]["early_stopping"] == [0, "eval/perplexity", 4]
