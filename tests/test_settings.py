"""Every flag that a recipe takes is read, or refused: none is accepted and ignored."""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from llmtrain.config.flags import Config, configs_of, flags_of
from llmtrain.errors import UserError
from llmtrain.launching.accelerator import forget_accelerator
from llmtrain.training import opening
from tests.launching import (
    BYTE_DATA,
    FINETUNE,
    GPT,
    ROOT,
    SIX_STEPS,
    SMALL_SIZE,
    TINY,
    write_chats,
)
from tests.recorded_settings import EFFECTS

Recipe = dict[str, Any]  # the names of a recipe's module

# --decay_share is read only with this schedule.
TWO_STEPS = shlex.split(
    "--max_steps 2 --eval_steps 1 --report_to none --lr_scheduler_type warmup_stable_decay"
)


@pytest.fixture(autouse=True)
def _first_run() -> Iterator[None]:
    """Let each test begin as the first run of its process."""
    yield
    forget_accelerator()


@pytest.fixture
def own_recipe(tmp_path: Path) -> Recipe:
    """The recipe of docs/tutorials/own-recipe.md."""
    page = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sums.py").write_text(code)
    return runpy.run_path(str(tmp_path / "sums.py"), run_name="sums")


# --- reads

# Functions that read all flags, to parse, check, compare or print them.
READ_ALL = {
    "__eq__",
    "__post_init__",
    "__repr__",
    "_asdict_inner",
    "asdict",
    "deepcopy",
    "parse",
    "replace",
    "resolved",
}


def is_called_from(frame: FrameType, function_names: set[str]) -> bool:
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_name in function_names:
            return True
        caller = caller.f_back
    return False


@pytest.fixture
def read_flags(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The flags that are read from now on, except by functions that read all of them."""
    names = set()

    def recording_getattribute(config: Config, name: str) -> Any:
        if name in EFFECTS and not is_called_from(sys._getframe(1), READ_ALL):
            names.add(name)
        return object.__getattribute__(config, name)

    monkeypatch.setattr(Config, "__getattribute__", recording_getattribute, raising=False)
    return names


def flags_of_recipe(recipe: Recipe) -> set[str]:
    names = set()
    for config in configs_of(recipe["DEFAULTS"]).values():
        names |= flags_of(config).keys()
    return names


def test_recipes_gpt_reads_every_flag(
    read_flags: set[str], text_file: Path, tmp_path: Path
) -> None:
    recipe = runpy.run_path(str(ROOT / GPT))
    flags = shlex.split(f"--warmup_steps 1 --dataset {text_file} --output_dir {tmp_path}/run")

    recipe["main"]([*TINY, *TWO_STEPS, *flags])

    assert flags_of_recipe(recipe) - read_flags == set()


def test_recipes_finetune_reads_every_flag(
    read_flags: set[str], text_file: Path, tmp_path: Path
) -> None:
    """It reads some flags only for conversations, and others only for text or adapters."""
    recipe = runpy.run_path(str(ROOT / FINETUNE))
    chats = write_chats(tmp_path / "chats.jsonl")
    chats.write_text(chats.read_text() + '{"messages": []}\n')
    common = [*BYTE_DATA, *SIX_STEPS, *TWO_STEPS, "--warmup_steps", "1"]
    new_model = f"--config_overrides {SMALL_SIZE} --from_config llama --on_bad_row skip"
    adapter = f"--model_name_or_path {tmp_path}/full/model --lora_r 2"

    def train(flags: str) -> None:
        recipe["main"]([*common, *shlex.split(flags)])

    train(f"{new_model} --dataset {chats} --output_dir {tmp_path}/full")
    with pytest.raises(UserError, match="--columns text=body has no effect"):
        train(f"{new_model} --dataset {chats} --columns text=body --output_dir {tmp_path}/refused")
    train(f"{adapter} --dataset {text_file} --output_dir {tmp_path}/adapter")

    assert flags_of_recipe(recipe) - read_flags == set()


def test_a_recipe_of_a_user_reads_or_refuses_every_flag(
    own_recipe: Recipe, read_flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[tuple[Path, str | None]] = []
    monkeypatch.setattr(opening, "publish", lambda model, name: published.append((model, name)))
    flags = [*TWO_STEPS, "--output_dir", str(tmp_path / "run"), "--push_to_hub", "me/sums"]

    own_recipe["main"]([*flags, "--dry_run"])
    assert [*tmp_path.iterdir()] == [tmp_path / "sums.py"], "a dry run writes nothing"
    own_recipe["main"](flags)

    assert published == [(tmp_path / "run" / "model", "me/sums")]
    for name in flags_of_recipe(own_recipe) - read_flags:
        with pytest.raises(UserError, match=f"--{name}"):
            own_recipe["main"]([*flags, f"--{name}", "0.5"])
