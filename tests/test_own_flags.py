"""A recipe can add sections of flags, which behave like the flags of the package."""

import copy
import dataclasses
import math
import re
import runpy
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import llmtrain as lt
from llmtrain.config.flags import resolved, settings_fingerprint
from llmtrain.errors import UserError
from recipes import finetune, gpt
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import PYTHON, ROOT, read_json

PAGE = ROOT / "docs" / "guides" / "own-flags.md"


@dataclass
class PenaltyConfig(lt.Config):
    """A section that a recipe adds."""

    group = "objective"
    affects = "numbers"

    penalty: float = lt.flag(0.5, "weight of the penalty")
    penalty_kind: Literal["l1", "l2"] = lt.flag("l1", "norm of the penalty")
    penalty_steps: list[int] = lt.flag([1, 2], "steps with a penalty", parse=int)
    log_penalty: bool = lt.flag(False, "whether to log it", affects="nothing")
    penalty_chunk: int = lt.flag(8, "rows at a time", affects="nothing")
    penalty_token: str | None = lt.flag(None, "password of a server", affects="numbers")


@dataclass
class Settings(lt.Settings):
    """The settings of a recipe with that section."""

    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)


DEFAULTS = Settings(data=lt.BatchConfig())


def parsed(flags: str, defaults: Any = DEFAULTS) -> Any:
    return lt.parse(defaults, shlex.split(flags))


def settings_with(section: type[lt.Config]) -> lt.Settings:
    """Return settings whose section `own` is of a class."""
    fields = [("own", section, field(default_factory=section))]
    own = dataclasses.make_dataclass("Settings", fields, bases=(lt.Settings,), kw_only=True)
    settings: lt.Settings = own(data=lt.BatchConfig())
    return settings


def error_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(lt.UserError) as caught:
        function(*arguments, **options)
    return str(caught.value)


# --- for users


def test_a_record_has_the_value_the_origin_and_the_effects_of_each_flag() -> None:
    record = resolved(parsed("--penalty 2"))
    assert record["penalty"] == {"value": 2.0, "from": "command line", "affects": "numbers"}
    assert record["log_penalty"] == {"value": False, "from": "recipe", "affects": "nothing"}
    assert "lora_r" not in record, "the recipe has no such section"


def test_the_fingerprint_has_the_own_flags_that_change_the_run_and_no_secrets() -> None:
    assert settings_fingerprint(parsed("--penalty_token Q9word")) == {
        "penalty": 0.5,
        "penalty_kind": "l1",
        "penalty_steps": [1, 2],
        "penalty_token": "***",
    }
    assert settings_fingerprint(gpt.DEFAULTS) == settings_fingerprint(finetune.DEFAULTS) == {}


def test_a_flag_added_to_a_section_of_the_package_is_in_the_fingerprint() -> None:
    @dataclass
    class ShiftedOptimConfig(lt.OptimConfig):
        learning_rate: float = lt.flag(3e-4, "another default")
        shift: int = lt.flag(1, "a new flag")

    settings = parsed("", defaults=Settings(data=lt.BatchConfig(), optim=ShiftedOptimConfig()))

    assert settings.optim.learning_rate == 3e-4
    fingerprint = settings_fingerprint(settings)
    assert "shift" in fingerprint
    assert "learning_rate" not in fingerprint


# --- for programs


def test_a_value_that_a_program_assigns_is_a_default_and_one_that_it_sets_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = PenaltyConfig(penalty=3.0)
    config.set_default("penalty", 4.0, "for a test")
    assert config.penalty == 4.0
    assert "--penalty 4 (for a test)" in capsys.readouterr().out

    config.set(penalty=3.0)
    config.set_default("penalty", 4.0, "for a test")
    assert config.penalty == 3.0

    settings = parsed("", defaults=Settings(data=lt.BatchConfig(), penalty=config))
    assert resolved(settings)["penalty"]["from"] == "program"
    assert parsed("--penalty 5", defaults=settings).penalty.penalty == 5.0
    assert parsed("--penalty_chunk 2", defaults=settings).penalty.origins["penalty"] == "program"


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (lt.OptimConfig(), {"max_steps": 0}),
        (lt.OptimConfig(), {"learning_rate": math.nan}),
        (lt.OptimConfig(), {"lr_scheduler_type": "cosin"}),
        (lt.OptimConfig(), {"max_steps": None}),
        (lt.OptimConfig(), {"max_steps": [3, 4]}),
    ],
)
def test_a_program_sets_no_value_that_the_command_line_refuses(
    config: lt.Config, values: dict[str, Any]
) -> None:
    before = copy.deepcopy(vars(config))
    [name] = values

    with pytest.raises(UserError, match=f"--{name}"):
        config.set(**values)

    assert vars(config) == before


def test_a_program_sets_texts_lists_and_nothing_as_a_user_does() -> None:
    config = lt.RunConfig()
    config.set(report_to="none", max_hours=1, output_dir=Path("runs/a"), async_save=True)
    config.set(max_hours=None)

    assert (config.report_to, config.max_hours, config.output_dir) == (["none"], None, "runs/a")
    assert config.async_save is True
    with pytest.raises(AttributeError, match="RunConfig has no flag async"):
        config.set(**{"async": 3.0})


# --- for authors of recipes


RECIPE_WITH_POSTPONED_ANNOTATIONS = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal
import llmtrain as lt

@dataclass
class Own(lt.Config):
    kind: Literal["a", "b"] = lt.flag("a", "a kind")

@dataclass
class Settings(lt.Settings):
    own: Own = field(default_factory=Own)

DEFAULTS = Settings(data=lt.BatchConfig())
"""


def test_flags_are_parsed_after_the_module_of_the_recipe_is_gone(tmp_path: Path) -> None:
    """`llmtrain plan` does so. Annotations that are text need the names of that module."""
    recipe = tmp_path / "own.py"
    recipe.write_text(RECIPE_WITH_POSTPONED_ANNOTATIONS)
    names = runpy.run_path(str(recipe), run_name="llmtrain.recipe")
    assert parsed("--kind b", defaults=names["DEFAULTS"]).own.kind == "b"


# --- the page


@pytest.fixture(scope="module")
def page_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of the page, with the flag --z_loss."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = tmp_path_factory.mktemp("page") / "zloss.py"
    recipe.write_text(code)
    return recipe


def test_the_page_shows_how_to_add_a_flag_to_another_recipe(page_recipe: Path) -> None:
    [extension] = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = runpy.run_path(str(page_recipe))
    exec(extension, names)

    settings = parsed("--z_loss 2 --lora_r 4", defaults=names["DEFAULTS"])

    assert settings.z.z_loss == 2.0
    assert settings.lora.lora_r == 4
    assert "--z_loss -1" in error_of(parsed, "--z_loss -1", defaults=names["DEFAULTS"])


def test_the_flag_of_the_page_is_in_the_record_the_fingerprint_and_the_diff(
    page_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--max_steps 4 --report_to none"
    default = tmp_path / "default"
    changed = tmp_path / "changed"
    command = [*PYTHON, str(page_recipe), *shlex.split(flags)]
    run_forked([*command, "--output_dir", str(default)]).assert_ok()
    run_forked([*command, "--output_dir", str(changed), "--z_loss", "0.1"]).assert_ok()

    record = read_json(changed / "run.json")
    expected = {"value": 0.1, "from": "command line", "affects": "numbers"}
    assert record["settings"]["z_loss"] == expected
    assert record["fingerprint"]["own_settings"] == {"z_loss": 0.1}

    _, out, _ = run_cli(capsys, "diff", str(default), str(changed))
    causes = re.findall(r"^cause +(.*)$", out, re.MULTILINE)
    assert causes == ["--z_loss 0.0001 and 0.1"]
