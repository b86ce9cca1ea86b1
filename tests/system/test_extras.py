"""Each extra alone has all that its feature needs; without it, the feature names the extra.

The environments have the packages of `pip install 'llmtrain[EXTRA]'` and no others.
"""

import shlex
from pathlib import Path

import pytest

from tests.environments import environment_with_extras
from tests.launching import FINETUNE, SMALL_LLAMA, Ended, long_form, run, write_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


def train(python: Path, folder: Path, chats: Path, flags: str = "") -> Ended:
    """Train a small Llama with random weights, or an adapter."""
    words = shlex.split(
        f"--block_size 64 --max_steps 3 --eval_fraction 0 --dataset {chats} "
        f"--output_dir {folder} {flags}"
    )
    return run([str(python), FINETUNE, *SMALL_LLAMA, *words])


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has no extra."""
    return environment_with_extras(tmp_path_factory.mktemp("without-extras") / "environment")


@long_form
def test_a_run_needs_no_extra(without_extras: Path, chats: Path, tmp_path: Path) -> None:
    train(without_extras, tmp_path / "run", chats).assert_ok()


@long_form
@pytest.mark.parametrize(
    ("extra", "flags"), [("lora", "--lora_r 4"), ("tensorboard", "--report_to tensorboard")]
)
def test_a_feature_needs_its_extra_and_nothing_else(
    extra: str, flags: str, without_extras: Path, chats: Path, tmp_path: Path
) -> None:
    ended = train(without_extras, tmp_path / "refused", chats, flags)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert flags in ended.err
    assert not (tmp_path / "refused").exists()

    python = environment_with_extras(tmp_path / "environment", extra)
    train(python, tmp_path / "run", chats, flags).assert_ok()
