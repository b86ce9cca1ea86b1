"""`llmtrain verify` proves that a run is the same on any layout, and finds planted bugs."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from llmtrain.commands import verify as verify_command
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import (
    BYTE_DATA,
    FINETUNE,
    GPT,
    PYTHON,
    ROOT,
    SIX_STEPS,
    SMALL_LLAMA,
    SMALL_SIZE,
    TINY,
    Ended,
    long_form,
    read_json,
    run,
    torchrun,
    write_text,
)

VERIFY = [*PYTHON, "-m", "llmtrain", "verify"]
PLANTED = "tests/system/planted.py"


def verify(
    flags: str,
    recipe: str,
    recipe_flags: list[str],
    env: dict[str, str] | None = None,
    timeout: float = 240,
) -> Ended:
    """Run `llmtrain verify`. ``flags`` begins with "layout" or "resume"."""
    return run([*VERIFY, *shlex.split(flags), recipe, *recipe_flags], env, timeout)


# --- bugs


def test_every_planted_bug_of_a_step_shows(tmp_path: Path) -> None:
    run_forked([*torchrun(2), "tests/system/controls.py", str(tmp_path / "found.json")]).assert_ok()
    effects_of_bugs = read_json(tmp_path / "found.json")

    assert effects_of_bugs.pop("nothing planted") == [[], []]
    assert len(effects_of_bugs) == 7
    for bug, effects_on_ranks in effects_of_bugs.items():
        assert any(effects_on_ranks), f"{bug} went unnoticed"
        assert "weights" in effects_on_ranks[1], bug

    effects = effects_of_bugs["one weight perturbed on rank 1"][0]
    [drift] = [effect for effect in effects if "drifted" in effect]
    assert "transformer.wte.weight of rank 1 differs from rank 0's" in drift
    effects = effects_of_bugs["a missing sync"][0]
    assert any("drifted" in effect for effect in effects)


def planted_bug(bug: str, layouts: str, folder: Path) -> Ended:
    """Verify layouts of a recipe with a bug. Its third step has one row, and padding."""
    text = write_text(folder / "text.txt", sentences=12)
    flags = [*TINY, "--dataset", str(text)]
    return verify(f"layout --layouts {layouts} --steps 3", PLANTED, flags, {"PLANTED": bug})


def assert_found(ended: Ended, message: str) -> None:
    assert ended.status == 1, ended.out + ended.err
    assert message in ended.out
    assert ended.out.splitlines()[-1] == "FAILED: not the same run"


def test_verify_finds_a_mean_of_means(tmp_path: Path) -> None:
    ended = planted_bug("a mean of means", "1", tmp_path)
    assert_found(ended, "1 process: gradient norm differs by")
    assert "1 process: weights differ by" in ended.out


@long_form
@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("a missing sync", "of rank 1 differs from rank 0's"),
        ("a sync in every micro-batch", "2 processes: gradients are reduced 2 times in a step"),
        (
            "unshifted token counts",
            "264 target tokens were counted up to step 1, but its rows have 256",
        ),
        ("a rank reading another's rows", "2 processes: different rows from step 2 on"),
    ],
)
def test_verify_finds_a_planted_bug_and_names_its_effect(
    bug: str, message: str, tmp_path: Path
) -> None:
    assert_found(planted_bug(bug, "2", tmp_path), message)


# --- layouts


@long_form
def test_runs_on_any_layout_are_the_same_up_to_rounding(text_file: Path) -> None:
    flags = [*TINY, "--dataset", str(text_file)]
    ended = verify("layout --layouts 1,2 --steps 4", GPT, flags).assert_ok()
    assert "passed: the same run" in ended.out


@long_form  # the short form is the bitwise run of test_kills.py, on 1 and 2 processes
@pytest.mark.parametrize(
    ("recipe", "model", "layouts"),
    [
        (GPT, "--architecture lfm2 --dropout 0.2", "2,8"),
        (FINETUNE, shlex.join(SMALL_LLAMA), "1,4"),
    ],
)
def test_a_bitwise_run_has_the_same_bits_on_any_number_of_processes(
    recipe: str, model: str, layouts: str, text_file: Path
) -> None:
    tiny = TINY if recipe == GPT else []
    flags = f"{model} --per_device_train_batch_size 1 --bitwise --dataset {text_file}"

    ended = verify(
        f"layout --layouts {layouts} --steps 3 --json",
        recipe,
        [*tiny, *shlex.split(flags)],
        timeout=600,
    ).assert_ok()

    report = json.loads(ended.out)
    assert report["same"] is True
    assert report["reference"]["layout"] == "1 process"
    assert len(report["others"]) == 2
    for other in report["others"]:
        assert other["same_rows"]
        assert other["weights"] == 0
        assert other["digest"] == report["reference"]["digest"]


@long_form
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_runs_are_nearly_the_same_on_two_layouts(text_file: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "accelerate_configs" / "cpu_ddp.yaml").read_text())
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}))

    ended = verify(
        f"layout --config_file {path} --layouts 2 --steps 4",
        GPT,
        [*TINY, "--dataset", str(text_file)],
    ).assert_ok()

    second_layout = ended.out.splitlines()[2]
    rows, *_, weight_difference, _ = second_layout.removeprefix("2 processes").split()
    assert rows == "same"
    assert 0 < float(weight_difference) < 1e-5


# --- killed runs


@long_form
@pytest.mark.timeout(600)
def test_a_killed_run_on_three_processes_has_the_same_bits_if_buckets_are_rebuilt(
    text_file: Path,
) -> None:
    # The model is wide enough for several buckets.
    wide = shlex.split(f"--n_embd 128 --global_batch_size 12 --dataset {text_file}")
    flags = [*TINY, *wide]
    resume = "resume --steps 30 --layouts 3"

    ended = verify(resume, GPT, flags, timeout=300).assert_ok()
    assert "passed: the same run" in ended.out

    bug = {"PLANTED": "buckets that are not settled"}
    ended = verify(resume, PLANTED, flags, env=bug, timeout=300)
    assert ended.status == 1
    assert "killed, resumed: some bits of the last checkpoint differ" in ended.out


@long_form
def test_a_killed_llama_with_dropout_has_the_same_bits(text_file: Path) -> None:
    config = f"--config_overrides {SMALL_SIZE},attention_dropout=0.1 --dataset {text_file}"
    flags = [*BYTE_DATA, *SIX_STEPS, *shlex.split(config)]
    ended = verify("resume --steps 60 --layouts 1", FINETUNE, flags).assert_ok()
    assert "passed: the same run" in ended.out


@pytest.mark.parametrize(
    ("device", "bitwise", "demanded"),
    [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)],
)
def test_bits_are_demanded_if_steps_repeat_to_the_last_bit(
    device: str,
    bitwise: bool,
    demanded: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    demands: list[bool] = []

    def compare(other: Any, same_bits: bool) -> Any:
        demands.append(same_bits)
        return SimpleNamespace(wrong=[], _asdict=dict)

    starts = [{"step": 0, "device": device}, {"step": 5, "device": device}]
    outcome = SimpleNamespace(
        name="1 process", digest="d", has=lambda name: bitwise, starts=starts, compare=compare
    )
    trial = SimpleNamespace(
        steps=20,
        layouts=[1],
        last_step=lambda folder: -1,
        run=lambda *_, **__: outcome,
        run_and_kill=lambda *_: 5,
    )
    monkeypatch.setattr(verify_command, "Trial", lambda *_, **__: trial)

    status, out, _ = run_cli(capsys, "verify", "resume", "--json", GPT)

    assert status == 0
    assert demands == [demanded]
    assert ("bits are not compared" in out) != demanded


# --- mistakes


@pytest.mark.parametrize(
    "flags",
    [
        f"resume --steps 0 {GPT}",
        f"layout --steps -1 {GPT}",
        f"layout --layouts 2y3 {GPT}",
        f"layout --config_file README.md {GPT}",
        "layout no/such/recipe.py",
    ],
)
def test_a_mistake_is_an_error_of_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_cli(capsys, "verify", *shlex.split(flags))

    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    _, *options, recipe = flags.split()
    assert " ".join(options or [recipe]) in err
