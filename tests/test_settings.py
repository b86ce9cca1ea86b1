"""Every flag that a recipe takes is read by somebody, or refused: none is taken and forgotten."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from llmtrain.config.flags import Config, configs_of, flags_of
from llmtrain.errors import UserError
from llmtrain.training import opening, start
from tests.launching import FINETUNE, GPT, ROOT, SMALL_LLAMA, TINY, series, write_chats
from tests.recorded_settings import EFFECTS

DUMPS = {
    "parse",
    "resolved",
    "asdict",
    "_asdict_inner",
    "__post_init__",
    "__eq__",
    "__repr__",
    "replace",
    "deepcopy",
}
SHORT = ["--max_steps", "2", "--eval_steps", "1", "--report_to", "none"]
SHORT += ["--lr_scheduler_type", "warmup_stable_decay"]  # which alone reads --decay_share


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the flags that are read, but for what only parses, checks or dumps them."""
    found: set[str] = set()
    names = {*EFFECTS}

    def reading(self: Config, name: str) -> Any:
        if name in names:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_name not in DUMPS:
                frame = frame.f_back
            if frame is None:
                found.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Config, "__getattribute__", reading, raising=False)
    return found


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """The recipe of docs/tutorials/own-recipe.md."""
    (code,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text(),
        re.DOTALL,
    )
    (tmp_path / "sums.py").write_text(code)
    return runpy.run_path(str(tmp_path / "sums.py"), run_name="sums")


@pytest.fixture
def migrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Step 4 of docs/guides/migrate.md."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "migrate"))
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(ROOT / "docs" / "migrate" / "4_llmtrain.py"), run_name="migrate")


@pytest.fixture(autouse=True)
def _one_after_the_other() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def unread(recipe: dict[str, Any], read: set[str]) -> set[str]:
    configs = configs_of(recipe["DEFAULTS"]).values()
    return {name for config in configs for name in flags_of(config)} - read


def test_every_flag_of_the_recipe_for_gpts_is_read(
    read: set[str], text_file: Path, tmp_path: Path
) -> None:
    recipe = runpy.run_path(str(ROOT / GPT))
    recipe["main"](
        [
            *TINY,
            *SHORT,
            "--warmup_steps",
            "1",
            "--dataset",
            str(text_file),
            "--output_dir",
            str(tmp_path / "run"),
        ]
    )
    assert unread(recipe, read) == set()


def test_every_flag_of_the_recipe_for_fine_tuning_is_read(
    read: set[str], text_file: Path, tmp_path: Path
) -> None:
    recipe, chats = runpy.run_path(str(ROOT / FINETUNE)), write_chats(tmp_path / "chats.jsonl")
    chats.write_text(chats.read_text() + '{"messages": []}\n')
    flags = [*SMALL_LLAMA[2:], *SHORT, "--warmup_steps", "1", "--output_dir"]
    full = [
        *SMALL_LLAMA[:2],
        "--from_config",
        "llama",
        "--dataset",
        str(chats),
        "--on_bad_row",
        "skip",
    ]
    recipe["main"]([*full, *flags, str(tmp_path / "full")])
    with pytest.raises(UserError, match="--text_field is for text"):
        recipe["main"]([*full, "--text_field", "body", *flags, str(tmp_path / "refused")])
    base = [
        "--model_name_or_path",
        str(tmp_path / "full" / "model"),
        "--lora_r",
        "2",
        "--dataset",
        str(text_file),
    ]
    recipe["main"]([*base, *flags, str(tmp_path / "adapter")])
    assert unread(recipe, read) == set()


def test_every_flag_of_ones_own_recipe_is_read_or_refused(
    own: dict[str, Any], read: set[str], tmp_path: Path
) -> None:
    flags = [*SHORT, "--output_dir", str(tmp_path / "run")]
    own["main"](flags)
    for name in unread(own, read):
        with pytest.raises(UserError, match=f"--{name}"):
            own["main"]([*flags, f"--{name}", "0.5"])


def test_every_flag_of_the_migration_is_read(
    migrated: dict[str, Any], read: set[str], tmp_path: Path
) -> None:
    migrated["main"]([*SHORT, "--eval_steps", "0", "--output_dir", str(tmp_path / "run")])
    assert unread(migrated, read) == set()
    for name in ("dataset", "tokenizer", "mixture", "eval_fraction"):
        with pytest.raises(UserError, match=f"unknown flag --{name}"):
            migrated["main"]([f"--{name}", "x"])


def test_a_recipe_of_ones_own_shows_its_rows_and_publishes_its_model(
    own: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    sent: list[tuple[Path, str | None]] = []
    monkeypatch.setattr(opening, "publish", lambda folder, name: sent.append((folder, name)))
    flags = [*SHORT, "--output_dir", str(tmp_path / "run")]
    own["main"]([*flags, "--dry_run"])
    assert "nothing was trained or written" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    own["main"]([*flags, "--push_to_hub", "me/sums"])
    assert sent == [(tmp_path / "run" / "model", "me/sums")]


def test_a_model_gets_the_columns_that_it_says_it_takes_and_bits_per_byte_are_right(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = runpy.run_path(str(ROOT / GPT))
    loaders: list[Any] = []
    honest = start.train_loader

    def noting_the_loader(*arguments: Any, **settings: Any) -> Any:
        loaders.append(honest(*arguments, **settings))
        return loaders[-1]

    monkeypatch.setattr(start, "train_loader", noting_the_loader)
    flags = [*TINY, *SHORT, "--warmup_steps", "1", "--dataset", str(text_file), "--output_dir"]
    for dropout in ("0", "0.5"):
        recipe["main"]([*flags, str(tmp_path / dropout), "--dropout", dropout])
    plain, keyed = (set(next(iter(loader)).batches[0]) for loader in loaders)
    assert keyed - plain == {"dropout_keys"}
    nats, bits = (series(tmp_path / "0", f"eval/{name}") for name in ("loss", "bits_per_byte"))
    assert bits[2] == pytest.approx(nats[2] / torch.log(torch.tensor(2.0)).item(), rel=0.02), (
        "a token is a byte here"
    )


def test_a_run_that_goes_on_trains_what_it_has_learned(own: dict[str, Any], tmp_path: Path) -> None:
    """`train` restores: there is no line of a recipe that could be forgotten."""
    flags = [
        "--report_to",
        "none",
        "--output_dir",
        str(tmp_path / "run"),
        "--eval_steps",
        "0",
        "--logging_steps",
        "1",
    ]
    flags += ["--warmup_steps", "20"]
    own["main"]([*flags, "--max_steps", "60"])
    source = ["--resume_from_checkpoint", str(tmp_path / "run")]
    own["main"]([*flags, *source, "--max_steps", "61", "--lr_scheduler_type", "constant"])
    losses = series(tmp_path / "run", "train/loss")
    assert series(tmp_path / "run-2", "train/loss")[61] < 0.8 * losses[1]
