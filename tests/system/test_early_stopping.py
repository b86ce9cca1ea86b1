"""A run that gains nothing more ends early, with the best weights, on any layout and after any interruption."""

import random
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
    TINY,
    begin,
    read_json,
    series,
    torchrun,
    wait,
    wait_for_readings,
    write_chats,
)

FLAGS = [
    *TINY,
    "--max_steps",
    "400",
    "--eval_steps",
    "4",
    "--save_steps",
    "6",
    "--eval_fraction",
    "0.3",
]
FLAGS += ["--learning_rate", "2e-2", "--early_stopping_patience", "3"]


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of which nothing can be learnt but how often each letter comes."""
    path = tmp_path_factory.mktemp("noise") / "noise.txt"
    path.write_text("".join(random.Random(0).choices("abcdefgh", k=1500)))
    return path


@pytest.fixture(scope="module")
def alone(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_forked(
        [*PYTHON, GPT, *FLAGS, "--dataset", str(noise), "--output_dir", str(folder)]
    ).assert_ok()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    some, others = weights(one), weights(other)
    return some.keys() == others.keys() and all(
        torch.equal(some[name], others[name]) for name in some
    )


def best_of(folder: Path) -> int:
    """The step of the lowest held-out loss, without the one before the first update."""
    losses = {step: loss for step, loss in series(folder, "eval/loss").items() if step}
    return min(losses, key=lambda step: (losses[step], step))


def test_it_ends_after_so_many_evaluations_and_keeps_the_best(alone: Path) -> None:
    best, last = best_of(alone), max(series(alone, "eval/loss"))
    assert last == best + 3 * 4 < 400
    status = read_json(alone / "status.json")
    assert (status["state"], status["step"]) == ("finished", last)
    assert status["reason"] == f"eval/loss has not improved in 3 evaluations since step {best}"
    assert same(alone / "model", alone / "checkpoints" / f"step-{best:08d}" / "model")
    others = [
        path for path in alone.glob("checkpoints/*/model") if str(best) not in path.parent.name
    ]
    assert others
    assert not any(same(alone / "model", path) for path in others)


def test_two_processes_stop_at_the_same_step(alone: Path, noise: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--dataset", str(noise), "--output_dir", str(tmp_path / "run")]
    run_forked([*torchrun(2), GPT, *flags]).assert_ok()
    assert best_of(tmp_path / "run") == best_of(alone)
    assert (
        read_json(tmp_path / "run" / "status.json")["step"]
        == read_json(alone / "status.json")["step"]
    )
    for name, tensor in weights(tmp_path / "run" / "model").items():
        torch.testing.assert_close(tensor, weights(alone / "model")[name], rtol=1e-3, atol=1e-4)


def test_an_interruption_changes_nothing(alone: Path, noise: Path, tmp_path: Path) -> None:
    command = [*PYTHON, GPT, *FLAGS, "--dataset", str(noise), "--output_dir", str(tmp_path / "run")]
    process = begin(command)
    try:
        wait_for_readings(process, tmp_path / "run", best_of(alone) + 2)
        process.send_signal(signal.SIGINT)
    finally:
        interrupted = wait(process)
    assert interrupted.status == 128 + signal.SIGINT
    assert read_json(tmp_path / "run" / "status.json")["state"] == "preempted"
    run_forked(command).assert_ok()
    assert (
        read_json(tmp_path / "run" / "status.json")["step"]
        == read_json(alone / "status.json")["step"]
    )
    assert same(tmp_path / "run" / "model", alone / "model")


def test_without_early_stopping_the_model_gets_the_best_weights_and_resuming_keeps_them(
    noise: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--max_steps", "48", "--eval_steps", "4", "--save_steps", "6"]
    flags += ["--eval_fraction", "0.3", "--learning_rate", "2e-2", "--load_best_model_at_end"]
    flags += ["--lr_scheduler_type", "constant", "--dataset", str(noise), "--output_dir"]
    folder = tmp_path / "run"
    run_forked([*PYTHON, GPT, *flags, str(folder)]).assert_ok()

    best = best_of(folder)
    assert read_json(folder / "status.json")["step"] == 48 > best
    assert same(folder / "model", folder / "checkpoints" / f"step-{best:08d}" / "model")
    assert not same(folder / "model", folder / "checkpoints" / "step-00000048" / "model")

    interrupted = tmp_path / "interrupted"
    command = [*PYTHON, GPT, *flags, str(interrupted)]
    process = begin(command)
    try:
        wait_for_readings(process, interrupted, best + best // 4 + 3)
        process.send_signal(signal.SIGTERM)
    finally:
        wait(process)
    assert best < read_json(interrupted / "status.json")["step"] < 48
    assert f"model/ has the weights of step {best}: the best eval/loss" in (
        run_forked(command).assert_ok().out
    )
    assert same(interrupted / "model", folder / "model")


def test_the_best_is_chosen_by_the_metric_that_the_user_names(noise: Path, tmp_path: Path) -> None:
    """And the run is another one than that without the choice."""
    flags = [*TINY, "--max_steps", "8", "--eval_steps", "0.5", "--dataset", str(noise)]
    flags += ["--eval_fraction", "0.3", "--output_dir", str(tmp_path / "run")]
    choice = ["--load_best_model_at_end", "--metric_for_best_model", "eval/perplexity"]
    run_forked([*PYTHON, GPT, *flags, *choice]).assert_ok()
    state = read_json(tmp_path / "run" / "checkpoints" / "step-00000008" / "state.json")
    perplexities = series(tmp_path / "run", "eval/perplexity")
    del perplexities[0]
    assert state["best"][:2] == [
        min(perplexities.values()),
        min(perplexities, key=perplexities.get),
    ]
    assert state["fingerprint"]["early_stopping"] == [0, "eval/perplexity", 4]


def test_other_patience_is_another_run(alone: Path, noise: Path) -> None:
    flags = [
        *FLAGS,
        "--early_stopping_patience",
        "1",
        "--dataset",
        str(noise),
        "--output_dir",
        str(alone),
    ]
    assert f"run       {alone}-2" in run_forked([*PYTHON, GPT, *flags]).assert_ok().out


def test_what_cannot_be_is_one_line(noise: Path, tmp_path: Path) -> None:
    def told(*flags: str) -> str:
        ended = run_forked(
            [
                *PYTHON,
                GPT,
                *FLAGS,
                "--dataset",
                str(noise),
                "--output_dir",
                str(tmp_path / "x"),
                *flags,
            ]
        )
        assert ended.status
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        return line

    assert "is not measured; choose one of eval/loss, eval/perplexity" in told(
        "--metric_for_best_model", "eval/accuracy"
    )
    assert "needs eval rows" in told("--eval_fraction", "0")
    assert "needs evaluations; set --eval_steps above 0" in told("--eval_steps", "0")
    best = ["--early_stopping_patience", "0", "--load_best_model_at_end"]
    assert "--load_best_model_at_end needs evaluations" in told(*best, "--eval_steps", "0")
    assert "--load_best_model_at_end needs eval rows" in told(*best, "--eval_fraction", "0")
    assert "has no effect without --early_stopping_patience" in told(
        "--early_stopping_patience", "0", "--metric_for_best_model", "eval/perplexity"
    )


def test_each_of_several_sources_has_a_held_out_loss_of_its_own(tmp_path: Path) -> None:
    """And the whole is their mean by tokens, on one process and on two."""
    for name, count in (("a", 40), ("b", 13)):
        write_chats(tmp_path / f"{name}.jsonl", count, seed=count)
    flags = [
        "--from_config",
        "llama",
        "--config_overrides",
        "hidden_size=32,num_hidden_layers=2,intermediate_size=64",
    ]
    flags += [
        "--block_size",
        "64",
        "--tokenizer",
        "byte",
        *TINY[10:],
        "--eval_fraction",
        "0.4",
        "--dataset",
    ]
    found = []
    for launcher, name in ((PYTHON, "one"), (torchrun(2), "two")):
        data = [
            str(tmp_path / "a.jsonl"),
            str(tmp_path / "b.jsonl"),
            "--output_dir",
            str(tmp_path / name),
        ]
        run_forked([*launcher, FINETUNE, *flags, *data]).assert_ok()
        losses = [
            series(tmp_path / name, key) for key in ("eval/loss", "eval/loss/a", "eval/loss/b")
        ]
        found.append([[*loss.values()] for loss in losses])
    whole, one, other = found[0]
    assert all(min(a, b) < mean < max(a, b) for mean, a, b in zip(whole, one, other, strict=True))
    for here, there in zip(*found, strict=True):
        assert here == pytest.approx(there, rel=1e-4)
