"""docs/guides/migrate.md: four files, the same losses. LLMTRAIN_WRITE_DOCS=1 writes them into the page."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from recipes import finetune
from tests.launching import PYTHON, ROOT, accelerate, long_form, run, series, torchrun

PAGE = ROOT / "docs" / "guides" / "migrate.md"
WRITE = bool(os.environ.get("LLMTRAIN_WRITE_DOCS"))
LOSS = re.compile(r"step +(\d+)  loss ([\d.]+)")


@long_form
def test_four_steps_from_a_loop_of_ones_own_have_the_same_losses(tmp_path: Path) -> None:
    def losses(command: list[str], step: str, *flags: str) -> tuple[dict[int, float], str]:
        words = [
            "env",
            "-C",
            str(tmp_path),
            *command,
            str(ROOT / "docs" / "migrate" / f"{step}.py"),
            *flags,
        ]
        ended = run(words, env={"ACCELERATE_USE_CPU": "true"}).assert_ok()
        assert "failed" not in ended.err
        return {int(number): float(loss) for number, loss in LOSS.findall(ended.out)}, ended.out

    config = accelerate("cpu_ddp")
    config[config.index("--config_file") + 1] = str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")
    plain, printed = losses(PYTHON, "1_plain")
    assert list(plain) == [5, 10, 15, 20]
    assert plain[20] < plain[5]
    assert losses(torchrun(2), "2_ddp")[0] == pytest.approx(plain, abs=2e-4)
    assert losses(config, "3_accelerate")[0] == pytest.approx(plain, abs=2e-4)
    losses(config, "4_llmtrain", "--report_to", "none", "--output_dir", str(tmp_path / "run"))
    assert series(tmp_path / "run", "train/loss") == pytest.approx(plain, abs=2e-4)
    longer = [
        "--max_steps",
        "24",
        "--resume_from_checkpoint",
        str(tmp_path / "run"),
        "--report_to",
        "none",
    ]
    said = losses(PYTHON, "4_llmtrain", *longer, "--output_dir", str(tmp_path / "longer"))[1]
    assert (
        "max_steps 20 -> 24; the learning rate goes from 0.003 in step 20 to 0.003 in step 21"
        in said
    )
    page = PAGE.read_text()
    shown = re.search(r"```\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    if WRITE:
        PAGE.write_text(page[: shown.start(1)] + printed + page[shown.end(1) :])
    else:  # another Python's documentation has other words here and there
        listed = {int(number): float(loss) for number, loss in LOSS.findall(shown[1])}
        assert listed == pytest.approx(plain, abs=0.1)


def test_the_page_names_each_default_that_changes_numbers_of_a_script() -> None:
    """The script on the page sets the epochs and the learning rate itself."""
    page = PAGE.read_text()
    trainer = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    ours = vars(finetune.DEFAULTS.optim)
    shared = ours.keys() & trainer.keys() - {"optim", "max_steps", "num_train_epochs"}
    different = {name for name in shared if ours[name] != trainer[name]} - {"learning_rate"}
    assert {"lr_scheduler_type", "adam_beta2"} <= different
    for name in different:
        assert f"`--{name} " in page or f" --{name} " in page, name
