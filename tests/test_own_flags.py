"""A recipe adds sections of flags of its own, with all that the package's own flags have."""

import dataclasses
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import llmtrain as lt
from llmtrain.config.flags import configs_of, resolved, settings_fingerprint
from recipes import finetune, gpt
from tests.launching import ROOT, read_json, run
from tests.test_cli import ended

PAGE = ROOT / "docs" / "guides" / "own-flags.md"


@dataclass
class PenaltyConfig(lt.Config):
    """Flags of a recipe."""

    group = "objective"
    affects = "pass"

    penalty: float = lt.flag(0.5, "weight of the penalty")
    penalty_kind: Literal["l1", "l2"] = lt.flag("l1", "norm of the penalty")
    penalty_steps: list[int] = lt.flag([1, 2], "steps with a penalty", parse=int)
    log_penalty: bool = lt.flag(False, "whether to log it", affects="nowhere")
    penalty_chunk: int = lt.flag(8, "rows at a time", affects="layout")
    penalty_token: str | None = lt.flag(None, "password of a server", affects="any")


@dataclass
class Settings(lt.Settings):
    """The settings of a recipe with a section of its own."""

    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)


DEFAULTS = Settings(data=lt.BatchConfig())


def parsed(*argv: str, defaults: Any = DEFAULTS) -> Any:
    return lt.parse(defaults, list(argv))


def with_section(section: type[lt.Config]) -> lt.Settings:
    """Settings with a section of one more class."""
    fields = [("own", section, field(default_factory=section))]
    own = dataclasses.make_dataclass("Settings", fields, bases=(lt.Settings,), kw_only=True)
    settings: lt.Settings = own(data=lt.BatchConfig())
    return settings


def error_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(lt.UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


# --- the user


def test_own_flags_are_parsed_and_helped_like_any_others(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "my.yaml"
    file.write_text("penalty: 0.25\npenalty_steps: [3]\n")
    settings = parsed("--config", str(file), "--penalty_kind", "l2", "--log_penalty")
    assert settings.penalty == PenaltyConfig(0.25, "l2", [3], log_penalty=True)
    assert error_of(parsed, "--penalti", "1").startswith(
        "unknown flag --penalti - did you mean --penalty?"
    )
    assert error_of(parsed, "--penalty_steps", "x") == (
        "--penalty_steps: invalid int value: 'x'; --help lists the flags."
    )

    with pytest.raises(SystemExit):
        parsed("--help")
    assert re.search(r"\nobjective:\n  --penalty X +weight of", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        parsed("--penalty", "2", "--print_config")
    assert "\npenalty: 2.0\n" in capsys.readouterr().out


def test_a_record_has_the_value_the_origin_and_the_effects_of_each_flag() -> None:
    record = resolved(parsed("--penalty", "2"))
    assert record["penalty"] == {"value": 2.0, "from": "command line", "affects": "pass"}
    assert record["log_penalty"] == {"value": False, "from": "recipe", "affects": "nowhere"}
    assert "lora_r" not in record  # the recipe has no such section


def test_the_fingerprint_has_own_flags_that_change_the_run_and_no_secrets() -> None:
    assert settings_fingerprint(gpt.DEFAULTS) == settings_fingerprint(finetune.DEFAULTS) == {}
    assert settings_fingerprint(parsed("--penalty_token", "Q9word")) == {
        "penalty": 0.5,
        "penalty_kind": "l1",
        "penalty_steps": [1, 2],
        "penalty_token": "***",
    }


def test_a_flag_that_a_recipe_adds_to_a_shipped_section_is_its_own() -> None:
    @dataclass
    class ShiftedOptimConfig(lt.OptimConfig):
        learning_rate: float = lt.flag(3e-4, "another default")
        shift: int = lt.flag(1, "a further flag")

    settings = parsed(defaults=Settings(data=lt.BatchConfig(), optim=ShiftedOptimConfig()))
    assert settings.optim.learning_rate == 3e-4
    assert "shift" in settings_fingerprint(settings)
    assert "learning_rate" not in settings_fingerprint(settings)


def test_sections_of_a_recipe_come_before_those_of_every_recipe() -> None:
    assert [*configs_of(finetune.DEFAULTS)] == [
        "data",
        "model",
        "lora",
        "chat",
        "optim",
        "parallel",
        "eval",
        "log",
        "run",
    ]


def test_what_a_program_assigns_is_a_default_and_what_it_sets_is_kept(
    capsys: pytest.CaptureFixture,
) -> None:
    config = PenaltyConfig()
    config.penalty = 3.0
    config.set_default("penalty", 4.0, "for a test")
    assert config.penalty == 4.0
    assert "--penalty 4 (for a test)" in capsys.readouterr().out

    config.set(penalty=3.0)
    config.set_default("penalty", 4.0, "for a test")
    assert config.penalty == 3.0
    settings = parsed(defaults=Settings(data=lt.BatchConfig(), penalty=config))
    assert resolved(settings)["penalty"]["from"] == "program"
    assert parsed("--penalty", "5", defaults=settings).penalty.penalty == 5.0
    with pytest.raises(AttributeError, match="PenaltyConfig has no flag penalti"):
        config.set(penalti=3.0)


# --- the author


def test_two_sections_with_a_flag_of_one_name_are_both_named() -> None:
    @dataclass
    class Clashing(lt.Config):
        learning_rate: float = lt.flag(1.0, "which is in OptimConfig, too")

    @dataclass
    class Negated(lt.Config):
        no_bitwise: bool = lt.flag(False, "the other side of a switch")

    @dataclass
    class Reserved(lt.Config):
        config: str = lt.flag("", "an option of every recipe")

    assert error_of(lt.parse, with_section(Clashing), []) == (
        "--learning_rate is a flag of own (Clashing) and of optim (OptimConfig); rename one of "
        "them."
    )
    assert "--no_bitwise is a flag of own (Negated) and of parallel (ParallelConfig)" in error_of(
        lt.parse, with_section(Negated), []
    )
    assert "--config is a flag of the options of every recipe and of own (Reserved)" in error_of(
        lt.parse, with_section(Reserved), []
    )


@dataclass
class WithoutFlag(lt.Config):
    size: int = 3


@dataclass
class WithoutDefault(lt.Config):
    sizes: list[int] = field(default_factory=list)


@dataclass
class BadWord(lt.Config):
    affects = "pass loss"

    size: int = lt.flag(3, "a size")


@dataclass
class BadWordOfFlag(lt.Config):
    size: int = lt.flag(3, "a size", affects="now here")


class Undecorated(lt.Config):
    size: int = lt.flag(3, "a size")


class UndecoratedOptim(lt.OptimConfig):
    size: int = lt.flag(3, "a size")


@dataclass
class Mapped(lt.Config):
    sizes: dict[str, int] = lt.flag({}, "sizes by name")


@dataclass
class Pathed(lt.Config):
    file: str = lt.flag(Path("x"), "a file")


@dataclass
class Numbered(lt.Config):
    size: Literal[1, 2] = lt.flag(1, "a size")


@dataclass
class Taken(lt.Config):
    origins: str = lt.flag("", "what Config has, too")


@dataclass
class Unknown(lt.Config):
    size: "Intt" = lt.flag(3, "a size")  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (WithoutFlag, 'WithoutFlag.size is no flag: write size: int = lt.flag(3, "what it is").'),
        (WithoutDefault, "WithoutDefault.sizes is no flag: write sizes: list"),
        (BadWord, "BadWord.size affects 'loss', which is no part of a run. The parts are seed, "),
        (BadWordOfFlag, "BadWordOfFlag.size affects 'now', which is no part of a run - did you"),
        (Undecorated, "Undecorated is no dataclass: write @dataclass above the class."),
        (UndecoratedOptim, "UndecoratedOptim is no dataclass: write @dataclass above the class."),
        (Mapped, "Mapped.sizes: a flag without parse=... is a str, int, float or bool, a Literal "),
        (Pathed, "Pathed.file has the default PosixPath('x'), which is no text, number or "),
        (Numbered, "Numbered.size: a flag without parse=... is a str, int, float or bool, a "),
        (Taken, "Taken.origins: lt.Config has something else of this name; rename the flag."),
        (Unknown, "Unknown.size has an unknown annotation: name 'Intt' is not defined."),
    ],
)
def test_a_section_that_cannot_be_flags_is_an_error_of_one_line(
    section: type[lt.Config], message: str
) -> None:
    assert error_of(lt.parse, with_section(section), []).startswith(message)


def test_a_list_without_flag_is_refused_by_python_itself() -> None:
    with pytest.raises(ValueError, match="mutable default"):

        @dataclass
        class Listed(lt.Config):
            sizes: list[int] = []  # noqa: RUF008


def test_what_is_no_section_is_an_error_of_one_line() -> None:
    @dataclass
    class Flat(lt.Settings):
        penalty: float = 1.0

    @dataclass
    class Unannotated(lt.Settings):
        own = PenaltyConfig()

    class Bare(lt.Settings):
        own: PenaltyConfig = field(default_factory=PenaltyConfig)

    data = lt.BatchConfig()
    assert error_of(lt.parse, Flat(data=data), []).startswith(
        "Flat.penalty is of type float, but a section of settings is an lt.Config."
    )
    assert error_of(lt.parse, Unannotated(data=data), []) == (
        "Unannotated.own has no annotation, so it is no section: write own: PenaltyConfig = "
        "field(default_factory=PenaltyConfig)."
    )
    assert error_of(lt.parse, Bare(data=data), []) == (
        "Bare is no dataclass: write @dataclass above the class."
    )


def test_a_recipe_that_is_gone_may_have_annotations_as_text(tmp_path: Path) -> None:
    """`llmtrain plan` loads a recipe, and parses its flags when its module is gone."""
    recipe = tmp_path / "own.py"
    recipe.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n"
        "from typing import Literal\n"
        "import llmtrain as lt\n"
        "@dataclass\n"
        "class Own(lt.Config):\n"
        "    kind: Literal['a', 'b'] = lt.flag('a', 'a kind')\n"
        "@dataclass\n"
        "class Settings(lt.Settings):\n"
        "    own: Own = field(default_factory=Own)\n"
        "DEFAULTS = Settings(data=lt.BatchConfig())\n"
    )
    names = runpy.run_path(str(recipe), run_name="llmtrain.recipe")
    assert parsed("--kind", "b", defaults=names["DEFAULTS"]).own.kind == "b"


# --- the page


def test_the_recipe_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its flag is in its help, in its record, in its fingerprint, and a cause for `diff`."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (extension,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = tmp_path / "zloss.py"
    recipe.write_text(code)

    names = runpy.run_path(str(recipe))
    exec(extension, names)
    extended = lt.parse(names["DEFAULTS"], ["--z_loss", "2", "--lora_r", "4"])
    assert (extended.z.z_loss, extended.lora.lora_r) == (2.0, 4)

    refused = run([sys.executable, str(recipe), "--z_loss", "-1"])
    assert (refused.status, refused.err) == (
        2,
        "error: --z_loss -1.0 is out of range: it must be at least 0.\n",
    )
    for name, flags in (("a", []), ("b", ["--z_loss", "0.1"])):
        folder = str(tmp_path / name)
        short = ["--max_steps", "4", "--report_to", "none", "--output_dir", folder]
        run([sys.executable, str(recipe), *short, *flags]).assert_ok()
    record = read_json(tmp_path / "b" / "run.json")
    assert record["settings"]["z_loss"] == {
        "value": 0.1,
        "from": "command line",
        "affects": "pass",
    }
    assert record["fingerprint"]["own_settings"] == {"z_loss": 0.1}
    _, out, _ = ended(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert re.findall(r"^cause +(.*)$", out, re.MULTILINE) == ["--z_loss 0.0001 and 0.1"]
