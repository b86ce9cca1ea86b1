"""Each extra alone has all that its feature needs; without it, the feature names the extra.

The environments have the packages of `pip install 'llmtrain[EXTRA]'` and no others.
"""

import shlex
from pathlib import Path

import pytest

from tests.environments import environment_with_extras
from tests.launching import FINETUNE, SMALL_LLAMA, Ended, long_form, run, write_chats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Python that has no extra, and a model that it has trained."""
    folder = tmp_path_factory.mktemp("without-extras")
    python = environment_with_extras(folder / "environment")
    write_chats(folder / "chats.jsonl")
    train(python, folder, "base", shlex.join(SMALL_LLAMA)).assert_ok()
    return folder


def train(python: Path, folder: Path, name: str, flags: str) -> Ended:
    options = shlex.split(
        f"{flags} --block_size 64 --max_steps 3 --eval_fraction 0 --dataset {folder}/chats.jsonl "
        f"--output_dir {folder}/{name}"
    )
    return run([str(python), FINETUNE, *options])


@long_form
@pytest.mark.parametrize(
    ("extra", "feature", "packages"),
    [
        ("lora", "--lora_r 4", "llmtrain[lora]"),
        ("tensorboard", "--report_to tensorboard", "pip install tensorboard"),
    ],
)
def test_a_feature_needs_its_extra_and_nothing_else(
    extra: str, feature: str, packages: str, folder: Path, tmp_path: Path
) -> None:
    flags = f"--model_name_or_path {folder}/base/model --report_to none {feature}"
    without_extras = folder / "environment" / "bin" / "python"

    ended = train(without_extras, folder, f"without-{extra}", flags)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert packages in ended.err

    python = environment_with_extras(tmp_path / "environment", extra)
    train(python, folder, f"with-{extra}", flags).assert_ok()
