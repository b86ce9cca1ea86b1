"""Fine-tuning: whole runs of recipes/finetune.py, and its dry runs."""

import copy
import io
import json
import runpy
import shlex
import shutil
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
    BYTE_DATA,
    FINETUNE,
    PYTHON,
    ROOT,
    SIX_STEPS,
    SMALL_LLAMA,
    Ended,
    accelerate,
    long_form,
    read_json,
    run,
    series,
    torchrun,
    write_chats,
)

VERIFY = [*PYTHON, "-m", "llmtrain", "verify"]
DryRun = Callable[[str], str]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def finetune_llama(flags: str, launcher: list[str] = PYTHON) -> Ended:
    """Train a small Llama with random weights."""
    return run_forked([*launcher, FINETUNE, *SMALL_LLAMA, *shlex.split(flags)]).assert_ok()


@pytest.fixture(scope="module")
def base(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model on one process, for 30 steps. Other tests fine-tune it further."""
    folder = tmp_path_factory.mktemp("base") / "run"
    finetune_llama(
        f"--block_size 64 --max_steps 30 --learning_rate 1e-2 --dataset {chats} "
        f"--output_dir {folder}"
    )
    return folder


# --- the same run on several processes


def largest_difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    pairs = zip(values, reference, strict=True)
    return max(abs(value / expected - 1) for value, expected in pairs)


def test_every_family_trains_alike_on_one_and_on_two_ranks(
    tmp_path: Path, score: Callable[[str], None]
) -> None:
    script = "tests/system/family_ranks.py"
    run_forked([*PYTHON, script, str(tmp_path / "on-one")]).assert_ok()
    run_forked([*torchrun(2), script, str(tmp_path / "on-two")]).assert_ok()
    on_one = read_json(tmp_path / "on-one")
    on_two = read_json(tmp_path / "on-two")

    assert on_one.keys() == on_two.keys() == set(FAMILIES)
    for family, reference in on_one.items():
        losses = reference["losses"]
        assert on_two[family]["losses"] == pytest.approx(losses, rel=1e-5), family
        assert on_two[family]["norms"] == pytest.approx(reference["norms"], rel=1e-4), family
        assert len(set(losses)) == 3, "each step changes the loss"
        assert losses[-1] < 1.2 * losses[0]

        difference = largest_difference(on_two[family]["losses"], losses)
        score(f"families: {family}: losses on one and on two ranks differ by {difference:.1e}")


@long_form
def test_two_processes_fine_tune_like_one(chats: Path, tmp_path: Path) -> None:
    on_one = tmp_path / "on-one"
    on_two = tmp_path / "on-two"
    flags = f"--block_size 64 --max_steps 6 --log_rows --dataset {chats} --output_dir"
    finetune_llama(f"{flags} {on_one}")
    ended = finetune_llama(f"{flags} {on_two}", launcher=accelerate("cpu_ddp"))

    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(on_two, key) == pytest.approx(series(on_one, key), rel=1e-5)
    assert (on_two / "rows.jsonl").read_text() == (on_one / "rows.jsonl").read_text()
    assert ended.out.count("tokens are targets") == 1
    assert "fine-tuning on the assistant's turns: the records are messages" in ended.out


@long_form
def test_a_bitwise_fine_tune_has_the_same_bits_on_two_and_four_processes(chats: Path) -> None:
    verify_flags = shlex.split("layout --layouts 2,4 --steps 3")
    flags = shlex.split(
        f"--block_size 64 --per_device_train_batch_size 1 --bitwise --dataset {chats}"
    )

    ended = run([*VERIFY, *verify_flags, FINETUNE, *SMALL_LLAMA, *flags]).assert_ok()

    _, *rows, verdict = [line.split() for line in ended.out.splitlines()]
    assert verdict[0] == "passed:"
    hashes = {row[-1] for row in rows}
    assert len(hashes) == 1


@long_form
def test_an_adapter_that_is_killed_and_resumed_ends_in_the_same_bits(
    base: Path, chats: Path
) -> None:
    verify_flags = shlex.split("resume --steps 60 --layouts 1")
    flags = shlex.split(
        f"--model_name_or_path {base}/model --lora_r 4 --lora_dropout 0.1 --block_size 64 "
        f"--dataset {chats}"
    )

    ended = run([*VERIFY, *verify_flags, FINETUNE, *flags, *SIX_STEPS]).assert_ok()

    assert "passed: the same run" in ended.out


# --- the trained model


def test_a_fine_tune_learns_and_records_its_targets(base: Path) -> None:
    losses = series(base, "eval/loss")
    assert losses[30] < 0.7 * losses[0]

    record = read_json(base / "run.json")
    assert record["task"] == "conversations"
    assert 0 < record["audit"]["targets"] < record["audit"]["tokens"]


@pytest.fixture(scope="module")
def answer_of_transformers(base: Path) -> list[int]:
    """Return the answer to "ab" that transformers generates with the trained model."""
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    prompt_length = prompt["input_ids"].shape[1]
    return tokens[0, prompt_length:].tolist()


def test_transformers_ends_the_answer_of_a_fine_tuned_model(
    base: Path, answer_of_transformers: list[int]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")

    assert end_of_turn in model.generation_config.eos_token_id
    assert end_of_turn in answer_of_transformers


def test_chat_prints_the_answers_of_transformers(
    base: Path,
    answer_of_transformers: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = shlex.split(f"chat {base} --temperature 0 --max_new_tokens 12")
    tokenizer = AutoTokenizer.from_pretrained(base / "model")

    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nb\n"))
    main(command)
    answers = capsys.readouterr().out.splitlines()
    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nb\n"))
    main([*command, "--json"])
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert len(answers) == 2
    assert answers[0] == tokenizer.decode(answer_of_transformers, skip_special_tokens=True)
    assert messages == [{"role": "assistant", "content": answer} for answer in answers]


def test_generate_prints_the_same_text_as_json(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.split(f"generate {base} --prompt ab --max_new_tokens 3")

    main(command)
    text = capsys.readouterr().out
    main([*command, "--json"])
    result = json.loads(capsys.readouterr().out)

    assert text == result["prompt"] + result["text"] + "\n"


def test_text_and_conversations_train_in_one_run_with_an_eval_loss_each(
    chats: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = finetune_llama(
        f"--block_size 64 --max_steps 4 --eval_steps 2 --dataset {chats} {text_file} "
        f"--mixture 3 1 --output_dir {folder}"
    )

    assert "mixture   chats 75.0% of rows, " in ended.out
    assert "--- a question that is not in the training data" in ended.out

    losses = series(folder, "eval/loss")
    losses_of_chats = series(folder, "eval/loss/chats")
    losses_of_text = series(folder, "eval/loss/text")
    assert [*losses] == [*losses_of_chats] == [*losses_of_text] == [0, 2, 4]
    for step, loss in losses.items():
        lower, higher = sorted([losses_of_chats[step], losses_of_text[step]])
        assert lower < loss < higher

    record = read_json(folder / "run.json")
    assert record["task"] == "conversations"
    assert sum(record["source_targets"]) == record["train_tokens"]


# --- adapters


@pytest.fixture(scope="module")
def adapter_run(base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an adapter of the base model for six steps."""
    folder = tmp_path_factory.mktemp("adapter") / "run"
    flags = shlex.split(
        f"--model_name_or_path {base}/model --lora_r 4 --block_size 64 --learning_rate 3e-2 "
        f"--dataset {chats} --output_dir {folder}"
    )
    ended = run_forked([*PYTHON, FINETUNE, *SIX_STEPS, *flags]).assert_ok()
    assert "of them trained" in ended.out
    return folder


def test_a_checkpoint_of_an_adapter_has_no_weights_of_the_base(adapter_run: Path) -> None:
    model = adapter_run / "checkpoints" / "step-00000006" / "model"
    names = {path.name for path in model.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names

    record = read_json(adapter_run / "run.json")
    assert record["fingerprint"]["initial_weights"]["weights"]["sha256"]


def test_a_merged_model_has_the_logits_of_its_adapter(
    adapter_run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(f"export {adapter_run} --merge --to {tmp_path}/merged --check"))
    assert "; its logits differ by " in capsys.readouterr().out

    def logits(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(1, 40)[None]).logits

    merged = logits(tmp_path / "merged")
    torch.testing.assert_close(merged, logits(adapter_run / "model"), atol=1e-5, rtol=0)
    assert (merged - logits(base / "model")).abs().max() > 1e-3, "the adapter has an effect"


def export_error(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    """Return the error of `llmtrain export`."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["export", *shlex.split(flags)])
    return capsys.readouterr().err


def test_export_with_check_removes_a_model_that_lacks_the_adapter(
    adapter_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unload = "peft.tuners.lora.LoraModel.merge_and_unload"
    monkeypatch.setattr(unload, lambda adapted_model: adapted_model.unload())

    message = export_error(capsys, f"{adapter_run} --merge --to {tmp_path}/merged --check")

    assert "the logits of its export differ by" in message
    assert not (tmp_path / "merged").exists()


def test_a_merge_into_an_existing_folder_is_refused(
    adapter_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "merged").mkdir()
    message = export_error(capsys, f"{adapter_run} --merge --to {tmp_path}/merged")
    assert "already exists: use it, or name another folder" in message


def test_a_merge_with_other_weights_of_the_base_is_refused(
    adapter_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(adapter_run / "model", tmp_path / "adapter")
    expected = read_json(model / "base.json")["sha256"]
    (model / "base.json").write_text(json.dumps({"sha256": expected[::-1]}))

    message = export_error(capsys, f"{model} --merge --to {tmp_path}/merged")

    assert "is an adapter of other weights" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "merged").exists()


# --- dry runs and settings


def test_a_dry_run_shows_the_audit_and_the_model_and_writes_no_run(
    chats: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    ended = finetune_llama(f"--block_size 128 --dry_run --dataset {chats} --output_dir {folder}")

    assert "tokens are targets" in ended.out
    assert "8 rows per step = 1 process x 4 micro-batches x 2 rows" in ended.out
    assert "LlamaForCausalLM:" in ended.out
    assert "llmtrain rows RECIPE" in ended.out
    assert not folder.exists()


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[DryRun]:
    """Return a function that makes a dry run in this process, and returns its output."""
    recipe = runpy.run_path(str(ROOT / FINETUNE))
    folder = tmp_path / "run"
    defaults = shlex.split(f"--block_size 64 --dry_run --output_dir {folder}")

    def output_of(flags: str) -> str:
        AcceleratorState._reset_state(reset_partial_state=True)
        capsys.readouterr()
        recipe["main"]([*BYTE_DATA, *SIX_STEPS, *defaults, *shlex.split(flags)])
        assert not folder.exists()
        return capsys.readouterr().out

    yield output_of
    AcceleratorState._reset_state(reset_partial_state=True)


def test_text_is_trained_as_text(dry_run: DryRun, text_file: Path) -> None:
    out = dry_run(f"--dataset {text_file}")
    assert "continued pretraining: the records are text" in out
    assert "tokens are targets" not in out


def test_flags_for_conversations_are_refused_for_text(dry_run: DryRun, text_file: Path) -> None:
    message = r"--overlong is for conversations, but .*text\.txt is text"
    with pytest.raises(UserError, match=message):
        dry_run(f"--dataset {text_file} --overlong error")


def test_fields_of_a_new_model_are_refused_for_a_pretrained_one(
    dry_run: DryRun, base: Path, chats: Path
) -> None:
    with pytest.raises(UserError, match="--config_overrides is for --from_config"):
        dry_run(f"--model_name_or_path {base} --config_overrides hidden_size=8 --dataset {chats}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param("", "--learning_rate 2e-05 (default for a pretrained model)", id="full"),
        pytest.param(
            "--lora_r 4", "--learning_rate 0.0002 (default for a pretrained model)", id="LoRA"
        ),
    ],
)
def test_a_pretrained_model_has_a_lower_default_learning_rate(
    flags: str, message: str, dry_run: DryRun, base: Path, chats: Path
) -> None:
    assert message in dry_run(f"--model_name_or_path {base}/model --dataset {chats} {flags}")


def test_a_learning_rate_of_the_user_is_kept_for_a_pretrained_model(
    dry_run: DryRun, base: Path, chats: Path
) -> None:
    out = dry_run(f"--model_name_or_path {base}/model --dataset {chats} --learning_rate 1e-3")
    assert "default for a pretrained model" not in out


@pytest.mark.parametrize(
    ("lora_r", "learning_rate", "expected"),
    [
        pytest.param(None, None, 2e-5, id="full"),
        pytest.param(4, None, 2e-4, id="LoRA"),
        pytest.param(None, 3e-4, 3e-4, id="learning rate of the user"),
    ],
)
def test_settings_of_a_program_have_the_model_and_the_learning_rate_of_a_run(
    lora_r: int | None, learning_rate: float | None, expected: float, base: Path, chats: Path
) -> None:
    settings = copy.deepcopy(finetune.DEFAULTS)
    settings.model.model_name_or_path = str(base)
    settings.data.dataset = [str(chats)]
    if lora_r is not None:
        settings.lora.set(lora_r=lora_r)
    if learning_rate is not None:
        settings.optim.set(learning_rate=learning_rate)

    rows = finetune.tokenized(settings)
    assert settings.model.model_name_or_path == str(base / "model")
    assert settings.optim.learning_rate == expected

    settings.model.model_name_or_path = str(base)
    finetune.build(settings, rows, "no")
    assert settings.model.model_name_or_path == str(base / "model")
