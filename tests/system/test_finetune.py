"""Fine-tuning as whole runs in real processes."""

import copy
import io
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.cli import main
from llmtrain.errors import UserError
from recipes import finetune
from tests.families import FAMILIES
from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    PYTHON,
    ROOT,
    SMALL_LLAMA,
    accelerate,
    long_form,
    read_json,
    run,
    series,
    torchrun,
    write_chats,
)

VERIFY = [str(BIN / "python"), "-m", "llmtrain", "verify"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="module")
def base(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was fine-tuned on one process: the base of others."""
    folder = tmp_path_factory.mktemp("base") / "run"
    flags = [*SMALL_LLAMA, "--block_size", "64", "--max_steps", "30", "--learning_rate", "1e-2"]
    run_forked(
        [*PYTHON, FINETUNE, *flags, "--dataset", str(chats), "--output_dir", str(folder)]
    ).assert_ok()
    return folder


def test_every_family_trains_alike_on_one_and_on_two_ranks(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    script = ["tests/system/family_ranks.py"]
    for launcher, name in ((PYTHON, "one"), (torchrun(2), "two")):
        run_forked([*launcher, *script, str(tmp_path / name)]).assert_ok()
    one, two = read_json(tmp_path / "one"), read_json(tmp_path / "two")
    assert one.keys() == two.keys() == set(FAMILIES)
    for family, readings in one.items():
        assert two[family]["losses"] == pytest.approx(readings["losses"], rel=1e-5), family
        assert two[family]["norms"] == pytest.approx(readings["norms"], rel=1e-4), family
        assert readings["losses"][2] < readings["losses"][0] * 1.2
        assert len(set(readings["losses"])) == 3
        apart = max(
            abs(a / b - 1) for a, b in zip(two[family]["losses"], readings["losses"], strict=True)
        )
        score(f"families: {family}: losses on one and on two ranks differ by {apart:.1e}")


def test_a_fine_tune_learns_and_leaves_a_model_that_answers(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    losses = series(base, "eval/loss")
    assert losses[30] < 0.7 * losses[0]
    record = read_json(base / "run.json")
    assert record["task"] == "conversations"
    assert 0 < record["audit"]["targets"] < record["audit"]["tokens"]
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in model.generation_config.eos_token_id
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**question, max_new_tokens=12, do_sample=False)[
        0, question["input_ids"].shape[1] :
    ]
    assert end in answer.tolist(), "it has learnt to end its turn"

    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nb\n"))
    main(["chat", str(base), "--temperature", "0", "--max_new_tokens", "12"])
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 2
    assert answers[0] == tokenizer.decode(answer, skip_special_tokens=True)

    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nb\n"))
    main(["chat", str(base), "--temperature", "0", "--max_new_tokens", "12", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"role": "assistant", "content": answer} for answer in answers]
    main(["generate", str(base), "--prompt", "ab", "--max_new_tokens", "3", "--json"])
    written = json.loads(capsys.readouterr().out)
    main(["generate", str(base), "--prompt", "ab", "--max_new_tokens", "3"])
    assert written["prompt"] + written["text"] + "\n" == capsys.readouterr().out


def test_text_and_conversations_train_in_one_run_with_an_eval_loss_each(
    chats: Path, text_file: Path, tmp_path: Path
) -> None:
    flags = [*SMALL_LLAMA, "--block_size", "64", "--max_steps", "4", "--eval_steps", "2"]
    data = ["--dataset", str(chats), str(text_file), "--mixture", "3", "1"]
    ended = run_forked(
        [*PYTHON, FINETUNE, *flags, *data, "--output_dir", str(tmp_path / "run")]
    ).assert_ok()
    assert "mixture   chats 75.0% of rows, " in ended.out
    assert "--- a question that is not in the training data" in ended.out
    losses = [series(tmp_path / "run", f"eval/loss{source}") for source in ("", "/chats", "/text")]
    for loss, *of_sources in zip(*(each.values() for each in losses), strict=True):
        assert min(of_sources) < loss < max(of_sources)
    assert all(len(each) == 3 for each in losses)
    record = read_json(tmp_path / "run" / "run.json")
    assert record["task"] == "conversations"
    assert sum(record["source_targets"]) == record["train_tokens"]


@long_form
def test_two_processes_fine_tune_as_one_does(base: Path, chats: Path, tmp_path: Path) -> None:
    flags = [
        *SMALL_LLAMA,
        "--block_size",
        "64",
        "--max_steps",
        "6",
        "--dataset",
        str(chats),
        "--log_rows",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    run_forked([*PYTHON, FINETUNE, *flags, "--output_dir", str(one)]).assert_ok()
    ended = run_forked(
        [*accelerate("cpu_ddp"), FINETUNE, *flags, "--output_dir", str(two)]
    ).assert_ok()
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(two, key) == pytest.approx(series(one, key), rel=1e-5)
    assert (one / "rows.jsonl").read_text() == (two / "rows.jsonl").read_text()
    assert ended.out.count("tokens are targets") == 1
    assert "fine-tuning on the assistant's turns: the records are messages" in ended.out


@long_form
@pytest.mark.parametrize("others", ["2,4"])
def test_a_fine_tune_has_the_same_bits_on_any_number_of_processes(others: str, chats: Path) -> None:
    flags = [*SMALL_LLAMA, "--block_size", "64", "--per_device_train_batch_size", "1", "--bitwise"]
    command = [
        *VERIFY,
        "layout",
        "--layouts",
        others,
        "--steps",
        "3",
        FINETUNE,
        *flags,
        "--dataset",
        str(chats),
    ]
    table = [line.split() for line in run(command).assert_ok().out.splitlines()]
    assert table[-1][0] == "passed:"
    assert len({line[-1] for line in table[1:-1]}) == 1


@long_form
def test_an_adapter_that_is_killed_and_goes_on_ends_in_the_same_bits(
    base: Path, chats: Path
) -> None:
    flags = [
        "--model_name_or_path",
        str(base / "model"),
        "--lora_r",
        "4",
        "--lora_dropout",
        "0.1",
        "--block_size",
        "64",
    ]
    flags += [*SMALL_LLAMA[8:], "--dataset", str(chats)]
    command = [*VERIFY, "resume", "--steps", "60", "--layouts", "1", FINETUNE, *flags]
    assert "passed: the same run" in run(command).assert_ok().out


def test_an_adapter_is_kept_alone_and_merges_into_a_model_of_its_own(
    base: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    flags = [
        "--model_name_or_path",
        str(base / "model"),
        "--lora_r",
        "4",
        "--block_size",
        "64",
        *SMALL_LLAMA[8:],
    ]
    flags += ["--learning_rate", "3e-2", "--dataset", str(chats), "--output_dir", str(folder)]
    ended = run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()
    assert "of them trained" in ended.out
    names = {path.name for path in (folder / "checkpoints" / "step-00000006" / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    assert read_json(folder / "run.json")["fingerprint"]["initial_weights"]["weights"]["sha256"]

    export = ["export", str(folder), "--merge", "--to"]
    capsys.readouterr()
    main([*export, str(tmp_path / "merged"), "--check"])
    assert "; its logits differ by " in capsys.readouterr().out
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        adapted = AutoModelForCausalLM.from_pretrained(folder / "model")(ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base / "model")(ids).logits
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)
    assert (plain - merged).abs().max() > 1e-3

    with monkeypatch.context() as planted:  # the base alone
        planted.setattr(
            "peft.tuners.lora.LoraModel.merge_and_unload", lambda adapted: adapted.unload()
        )
        with pytest.raises(SystemExit):
            main([*export, str(tmp_path / "wrong"), "--check"])
    assert "the logits of its export differ by" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()

    with pytest.raises(SystemExit):
        main([*export, str(tmp_path / "merged")])
    assert "already exists: use it, or name another folder" in capsys.readouterr().err
    other = json.loads((folder / "model" / "base.json").read_text())
    (folder / "model" / "base.json").write_text(json.dumps({"sha256": other["sha256"][::-1]}))
    with pytest.raises(SystemExit):
        main([*export, str(tmp_path / "refused")])
    message = capsys.readouterr().err
    assert "is an adapter of other weights" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "refused").exists()


def test_a_dry_run_shows_what_is_trained_and_writes_no_run(chats: Path, tmp_path: Path) -> None:
    flags = [
        *SMALL_LLAMA,
        "--block_size",
        "128",
        "--dry_run",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    ended = run_forked([*PYTHON, FINETUNE, *flags, "--dataset", str(chats)]).assert_ok()
    for shown in (
        "tokens are targets",
        "8 rows per step = 1 process x 4 micro-batches x 2 rows",
        "LlamaForCausalLM:",
        "===== row 0",
    ):
        assert shown in ended.out
    assert "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}" in ended.out
    assert "----- the next document" in ended.out
    assert not (tmp_path / "run").exists()


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """What the recipe prints before its first update, in this process."""
    main = runpy.run_path(str(ROOT / FINETUNE))["main"]

    def dry_run(*flags: str) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        main(
            [
                *SMALL_LLAMA[2:],
                "--block_size",
                "64",
                "--dry_run",
                "--output_dir",
                str(tmp_path / "run"),
                *flags,
            ]
        )
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().out

    yield dry_run
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("chosen", "rate"), [({}, 2e-5), ({"learning_rate": 3e-4}, 3e-4), ({"lora_r": 4}, 2e-4)]
)
def test_settings_made_as_objects_know_a_run_and_the_rate_of_its_model(
    chosen: dict[str, float], rate: float, base: Path, chats: Path
) -> None:
    settings = copy.deepcopy(finetune.DEFAULTS)
    settings.model.model_name_or_path = str(base)
    settings.data.dataset = [str(chats)]
    for name, value in chosen.items():
        config = settings.lora if name == "lora_r" else settings.optim
        config.set(**{name: value})
    rows = finetune.tokenized(settings)
    assert settings.model.model_name_or_path == str(base / "model")
    assert settings.optim.learning_rate == rate

    settings.model.model_name_or_path = str(base)
    finetune.build(settings, rows, "no")
    assert settings.model.model_name_or_path == str(base / "model")


def test_text_is_trained_on_as_text(dry_run: Callable[..., str], text_file: Path) -> None:
    out = dry_run("--dataset", str(text_file))
    assert "continued pretraining: the records are text" in out
    assert "tokens are targets" not in out
    with pytest.raises(
        UserError, match=r"--overlong is for conversations, but .*text\.txt is text"
    ):
        dry_run("--dataset", str(text_file), "--overlong", "error")


@pytest.mark.parametrize(
    ("flags", "rate"),
    [([], "2e-05"), (["--lora_r", "4"], "0.0002"), (["--learning_rate", "1e-3"], None)],
)
def test_a_model_that_was_trained_before_is_trained_on_gently(
    dry_run: Callable[..., str], base: Path, chats: Path, flags: list[str], rate: str | None
) -> None:
    out = dry_run("--model_name_or_path", str(base / "model"), "--dataset", str(chats), *flags)
    assert (f"--learning_rate {rate} (default for a pretrained model)" in out) == (rate is not None)
    assert ("default for a pretrained model" in out) == (rate is not None)


def test_what_would_do_nothing_is_refused(
    dry_run: Callable[..., str], base: Path, chats: Path
) -> None:
    with pytest.raises(UserError, match="--config_overrides is for --from_config"):
        dry_run(
            "--model_name_or_path",
            str(base),
            "--config_overrides",
            "hidden_size=8",
            "--dataset",
            str(chats),
        )
