"""Fine-tuning: whole runs of recipes/finetune.py, and its dry runs."""

import copy
import io
import json
import runpy
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.training.layout import fit_to_rows
from recipes import finetune
from tests.command_line import run_cli
from tests.families import FAMILIES
from tests.forked import run_forked
from tests.launching import (
    BYTE_DATA,
    FINETUNE,
    PYTHON,
    ROOT,
    SIX_STEPS,
    SMALL_LLAMA,
    long_form,
    read_json,
    run,
    series,
    torchrun,
    write_chats,
)

VERIFY = [*PYTHON, "-m", "llmtrain", "verify"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def finetune_llama(flags: str) -> None:
    """Train a small Llama with random weights."""
    run_forked([*PYTHON, FINETUNE, *SMALL_LLAMA, *shlex.split(flags)]).assert_ok()


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


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["gpt2", "llama", "gemma2", "mixtral"], id="four"),
        pytest.param([*FAMILIES], id="all", marks=long_form),
    ],
)
def test_families_train_alike_on_one_and_on_two_ranks(
    families: list[str], tmp_path: Path, score: Callable[[str], None]
) -> None:
    script = "tests/system/family_ranks.py"
    run_forked([*PYTHON, script, str(tmp_path / "on-one"), *families]).assert_ok()
    run_forked([*torchrun(2), script, str(tmp_path / "on-two"), *families]).assert_ok()
    on_one = read_json(tmp_path / "on-one")
    on_two = read_json(tmp_path / "on-two")

    assert on_one.keys() == on_two.keys() == set(families)
    for family, reference in on_one.items():
        losses = reference["losses"]
        losses_on_two = on_two[family]["losses"]
        assert losses_on_two == pytest.approx(losses, rel=1e-5), family
        assert on_two[family]["norms"] == pytest.approx(reference["norms"], rel=1e-4), family
        assert len(set(losses)) == 3, "each step changes the loss"
        assert losses[-1] < 1.2 * losses[0]

        pairs = zip(losses_on_two, losses, strict=True)
        difference = max(abs(loss / expected - 1) for loss, expected in pairs)
        score(f"families: {family}: losses on one and on two ranks differ by {difference:.1e}")


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


def test_chat_prints_the_answers_of_transformers_which_end(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokens[0, prompt["input_ids"].shape[1] :].tolist()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in answer

    monkeypatch.setattr("sys.stdin", io.StringIO("ab\nb\n"))
    main(shlex.split(f"chat {base} --temperature 0 --max_new_tokens 12 --json"))

    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [message["role"] for message in messages] == ["assistant", "assistant"]
    assert messages[0]["content"] == tokenizer.decode(answer, skip_special_tokens=True)


def test_text_and_conversations_train_in_one_run_with_an_eval_loss_each(
    chats: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    finetune_llama(
        f"--block_size 64 --max_steps 4 --eval_steps 2 --dataset {chats} {text_file} "
        f"--mixture 3 1 --output_dir {folder}"
    )

    losses = series(folder, "eval/loss")
    losses_of_chats = series(folder, "eval/loss/chats")
    losses_of_text = series(folder, "eval/loss/text")
    assert [*losses] == [*losses_of_chats] == [*losses_of_text] == [0, 2, 4]
    for step, loss in losses.items():
        lower, higher = sorted([losses_of_chats[step], losses_of_text[step]])
        assert lower < loss < higher

    record = read_json(folder / "run.json")
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
    run_forked([*PYTHON, FINETUNE, *SIX_STEPS, *flags]).assert_ok()
    return folder


def test_a_checkpoint_of_an_adapter_has_no_weights_of_the_base(adapter_run: Path) -> None:
    model = adapter_run / "checkpoints" / "step-00000006" / "model"
    names = {path.name for path in model.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names

    record = read_json(adapter_run / "run.json")
    assert record["fingerprint"]["initial_weights"]["weights"]["sha256"]


def test_a_merged_model_has_the_logits_of_its_adapter(
    adapter_run: Path, base: Path, tmp_path: Path
) -> None:
    main(shlex.split(f"export {adapter_run} --merge --to {tmp_path}/merged"))

    def logits(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(1, 40)[None]).logits

    merged = logits(tmp_path / "merged")
    torch.testing.assert_close(merged, logits(adapter_run / "model"), atol=1e-5, rtol=0)
    assert (merged - logits(base / "model")).abs().max() > 1e-3, "the adapter has an effect"


def test_a_merge_that_would_be_wrong_is_refused_and_leaves_nothing(
    adapter_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_other_weights = shutil.copytree(adapter_run / "model", tmp_path / "adapter")
    expected = read_json(of_other_weights / "base.json")["sha256"]
    (of_other_weights / "base.json").write_text(json.dumps({"sha256": expected[::-1]}))
    merged = tmp_path / "merged"

    status, _, err = run_cli(
        capsys, "export", str(of_other_weights), "--merge", "--to", str(merged)
    )

    assert status == 2
    assert "was trained on different weights" in err.splitlines()[-1]
    assert not merged.exists()


# --- dry runs and settings


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        pytest.param("--dataset {chats}", None, id="conversations"),
        pytest.param("--dataset {text_file}", None, id="text"),
        pytest.param("--dataset {text_file} --overlong error", "--overlong", id="overlong"),
        pytest.param(
            "--dataset {chats} --model_name_or_path {base} --config_overrides hidden_size=8",
            "--config_overrides",
            id="fields of a new model",
        ),
    ],
)
def test_a_dry_run_accepts_or_refuses_its_flags_and_writes_no_run(
    flags: str,
    error: str | None,
    accelerator: Accelerator,
    base: Path,
    chats: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = runpy.run_path(str(ROOT / FINETUNE))
    paths = {"base": base, "chats": chats, "text_file": text_file}
    words = shlex.split(f"--dry_run --output_dir {tmp_path}/run {flags.format(**paths)}")
    command = [*BYTE_DATA, *SIX_STEPS, *words]

    if error:
        with pytest.raises(UserError, match=error):
            recipe["main"](command)
    else:
        recipe["main"](command)
        assert "8 rows per step = 1 process x 4 micro-batches x 2 rows" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


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
    assert settings.model.model_name_or_path == str(base)
    assert settings.optim.learning_rate == expected

    finetune.build(settings, rows, "no")
    fit_to_rows(settings, rows)
    assert settings.model.model_name_or_path == str(base / "model")
