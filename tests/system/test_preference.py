"""Preferences as whole runs in real processes."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.cli import main
from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    SMALL_LLAMA,
    long_form,
    read_json,
    run,
    series,
    write_pairs,
)

VERIFY = [str(BIN / "python"), "-m", "llmtrain", "verify"]
COMPARED = [
    "--from_config",
    "llama",
    "--chat_template",
    "chatml",
    *SMALL_LLAMA,
    "--block_size",
    "64",
]
COMPARED += ["--learning_rate", "1e-2"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


@pytest.mark.parametrize(
    ("loss", "layouts", "bits"),
    [
        pytest.param("kto", "1x1x8,2x2x2", [], marks=long_form),
        pytest.param("reward", "1x1x8,4x1x2", [], marks=long_form),
        pytest.param("sigmoid", "1x8x1,2x4x1,4x2x1", ["--bitwise"], marks=long_form),
        pytest.param("kto", "1x8x1,2x4x1", ["--bitwise"], marks=long_form),
        pytest.param("aot sft", "1x1x8,1x4x2,2x2x2", [], marks=long_form),
        pytest.param("aot_unpaired sft", "1x8x1,2x4x1", ["--bitwise"], marks=long_form),
    ],
)
def test_ragged_pairs_make_the_same_run_on_any_layout(
    loss: str, layouts: str, bits: list[str], pairs: Path
) -> None:
    command = [
        *VERIFY,
        "layout",
        "--layouts",
        layouts,
        "--steps",
        "3",
        PREFERENCE,
        "--loss_type",
        *loss.split(),
        *COMPARED,
    ]
    ended = run([*command, *bits, "--dataset", str(pairs)], timeout=400).assert_ok()
    assert "passed: the same run" in ended.out
    if bits:
        assert len({line.split()[-1] for line in ended.out.splitlines()[1:-1]}) == 1


@long_form
@pytest.mark.parametrize("loss", ["kto"])  # it has a baseline, too
def test_a_killed_comparison_goes_on_in_the_same_bits(loss: str, pairs: Path) -> None:
    command = [
        *VERIFY,
        "resume",
        "--steps",
        "30",
        "--layouts",
        "2",
        PREFERENCE,
        "--loss_type",
        loss,
        *COMPARED,
    ]
    assert (
        "passed: the same run"
        in run([*command, "--dataset", str(pairs)], timeout=400).assert_ok().out
    )


@pytest.mark.parametrize(
    ("bug", "loss", "says"),
    [
        pytest.param(
            "a mean of ranks' means of pairs",
            "sigmoid",
            "gradient norm differs by",
            marks=long_form,
        ),
        pytest.param(
            "a pair split over two processes",
            "sigmoid",
            "2x2x2: different number of target tokens from step 1 on",
            marks=long_form,
        ),
        pytest.param(
            "a baseline of each process", "kto", "gradient norm differs by", marks=long_form
        ),
        pytest.param(
            "quantiles of each process", "aot", "gradient norm differs by", marks=long_form
        ),
    ],
)
def test_a_planted_bug_of_pairs_fails_the_verification_which_names_it(
    bug: str, loss: str, says: str, pairs: Path
) -> None:
    command = [
        *VERIFY,
        "layout",
        "--layouts",
        "1x1x8,2x2x2",
        "--steps",
        "3",
        "tests/system/planted.py",
    ]
    command += ["--loss_type", loss, *COMPARED, "--dataset", str(pairs)]
    ended = run(command, env={"PLANTED": bug}, timeout=200)
    assert ended.status == 1, ended.out + ended.err
    assert says in ended.out
    assert ended.out.splitlines()[-1] == "FAILED: not the same run"


@long_form
@pytest.mark.timeout(900)
def test_from_text_to_a_chat_each_recipe_takes_the_folder_of_the_one_before(
    pairs: Path,
    tmp_path: Path,
    score: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        pairs.read_text().replace('"chosen"', '"completion"').replace(', "rejected": ', ', "not": ')
    )
    text = tmp_path / "text.txt"
    text.write_text("\n".join(re.findall(r'"[a-e]+"', pairs.read_text())) * 3)
    shape = ["--architecture", "lfm2", "--n_layer", "2", "--n_head", "2", "--n_embd", "64"]
    steps = {GPT: 20, FINETUNE: 40, PREFERENCE: 40}
    more = {
        GPT: ["--dataset", str(text), "--tokenizer", "byte", *shape],
        FINETUNE: [
            "--dataset",
            str(chats),
            "--chat_template",
            "chatml",
            "--learning_rate",
            "3e-3",
        ],
        PREFERENCE: [
            "--dataset",
            str(pairs),
            "--learning_rate",
            "3e-3",
            "--eval_fraction",
            "0.2",
            "--beta",
            "0.3",
        ],
    }
    for before, recipe in zip((None, GPT, FINETUNE), steps, strict=True):
        # Preferences take the fine-tuning run next to their folder by themselves.
        model = ["--model_name_or_path", str(tmp_path / "gpt")] if before == GPT else []
        flags = [
            "--block_size",
            "64",
            "--max_steps",
            str(steps[recipe]),
            "--eval_steps",
            "20",
            "--warmup_steps",
            "5",
        ]
        flags += [
            "--global_batch_size",
            "8",
            "--report_to",
            "none",
            "--output_dir",
            str(tmp_path / Path(recipe).stem),
        ]
        run([*PYTHON, recipe, *more[recipe], *model, *flags], timeout=280).assert_ok()
    right = series(tmp_path / "preference", "eval/rewards/accuracies")
    losses = series(tmp_path / "preference", "eval/loss")
    score(
        f"preferences: held-out accuracy {right[0]:.2f} before, {right[40]:.2f} after {steps[PREFERENCE]} updates"
    )
    assert right[40] > max(right[0], 0.7)
    assert losses[40] < losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert read_json(tmp_path / "preference" / "run.json")["task"] == "preferences"
    monkeypatch.setattr("sys.stdin", io.StringIO("abce\n"))
    main(
        [
            "chat",
            str(tmp_path / "preference"),
            "--temperature",
            "0",
            "--max_new_tokens",
            "12",
            "--json",
        ]
    )
    assert json.loads(capsys.readouterr().out)["content"]
