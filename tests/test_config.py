"""The command line overrides YAML files, and they override the defaults of a recipe.

The settings of a test are those of Toy and Box, unless it needs a real config.
"""

import dataclasses
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest

from llmtrain.config.command_line import parse
from llmtrain.config.flags import Config, configs_of, flag, resolved
from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.parallel.config import ParallelConfig
from llmtrain.training.settings import EvalConfig, OptimConfig, RunConfig

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("[!_]*.py"))
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


@dataclass
class Toy(Config):
    group: ClassVar[str] = "toys"

    size: int = flag(3, "how large it is, 100% of the time")
    rate: float = flag(0.5, "a rate")
    name: str = flag("bear", "a name", metavar="WORD")
    maker: str | None = flag(None, "a maker")
    soft: bool = flag(True, "whether it is soft")
    loud: bool = flag(False, "whether it is loud")
    colour: Literal["red", "blue"] = flag("red", "a colour")
    parts: list[str] = flag(["head", "tail"], "its parts")
    shifts: list[int] = flag([1], "numbers")
    secret: int = flag(1, "a flag for programs", hidden=True)
    stuffed: bool | None = flag(None, "whether it is stuffed", group="boxes")
    full_name: str | None = flag(None, "its full name", alias="long_name")


@dataclass
class Box(Config):
    group: ClassVar[str] = "boxes"

    lid: str = flag("round", "a lid")


def settings_of(*configs: Config) -> Any:
    """Return settings with these configs as their sections."""
    names = [f"section{i}" for i in range(len(configs))]
    return dataclasses.make_dataclass("Settings", names)(*configs)


def parsed(config: Config, flags: str = "") -> Any:
    """Return a config after parsing flags, written as on a command line."""
    settings = parse(settings_of(config), shlex.split(flags))
    [config] = configs_of(settings).values()
    return config


def toy(flags: str) -> Toy:
    return parsed(Toy(), flags)


def values_and_origins(settings: Any) -> dict[str, tuple[object, str]]:
    return {name: (entry["value"], entry["from"]) for name, entry in resolved(settings).items()}


def error_of(config: Config, flags: str = "") -> str:
    """Return the error, of one line, that a command line causes."""
    with pytest.raises(UserError) as caught:
        parsed(config, flags)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def toy_error(flags: str) -> str:
    return error_of(Toy(), flags)


class YamlFile:
    """A config file for Toy."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, text: str | bytes) -> None:
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)

    def toy(self, text: str | bytes, flags: str = "") -> Toy:
        """Return Toy with the settings of a file, and further flags."""
        self.write(text)
        return toy(f"--config {self.path} {flags}")

    def error(self, text: str | bytes, flags: str = "") -> str:
        self.write(text)
        return toy_error(f"--config {self.path} {flags}")


@pytest.fixture
def yaml_file(tmp_path: Path) -> YamlFile:
    return YamlFile(tmp_path / "toy.yaml")


# --- precedence


def test_flags_override_yaml_and_yaml_overrides_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text("size: 5\nrate: 0.5\n")  # its default
    defaults = settings_of(Toy(size=4, name="duck"), Box())

    settings = values_and_origins(parse(defaults, ["--size", "6", "--config", str(path)]))

    assert settings["size"] == (6, "command line")
    assert settings["rate"] == (0.5, str(path))
    assert settings["name"] == ("duck", "recipe")
    assert settings["lid"] == ("round", "recipe")


@pytest.mark.parametrize("flags", ["--config {team} {job}", "--config {team} --config {job}"])
def test_later_files_override_earlier_ones_and_all_files_the_environment(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: tmp_path / f"{name}.yaml" for name in ("platform", "team", "job")}
    paths["platform"].write_text("save_total_limit: 5\nsave_steps: 6\nmax_hours: 6\n")
    paths["team"].write_text("save_steps: 7\nmax_hours: 7\nrun_name: team\n")
    paths["job"].write_text("save_steps: 8\n")
    monkeypatch.setenv("LLMTRAIN_CONFIG", str(paths["platform"]))

    words = shlex.split(flags.format(**paths))
    values = values_and_origins(parse(settings_of(RunConfig()), [*words, "--run_name", "mine"]))

    assert values["save_total_limit"] == (5, f"LLMTRAIN_CONFIG={paths['platform']}")
    assert values["max_hours"] == (7.0, str(paths["team"]))
    assert values["save_steps"] == (8, str(paths["job"]))
    assert values["run_name"] == ("mine", "command line")


def test_an_error_names_the_variable_of_the_environment_that_causes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMTRAIN_CONFIG", "absent.yaml")
    assert "LLMTRAIN_CONFIG=absent.yaml" in error_of(RunConfig())


def test_the_command_line_of_the_process_is_read_except_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--size", "8"])
    assert parse(settings_of(Toy())).section0.size == 8

    kernel = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    assert parse(settings_of(Toy())).section0 == Toy()


def test_the_last_of_two_equal_flags_wins_and_lists_are_not_joined(yaml_file: YamlFile) -> None:
    assert toy("--size 1 --size 2").size == 2
    assert yaml_file.toy("parts: [a, b, c]", "--parts d").parts == ["d"]


@pytest.mark.parametrize("flags", ["", "--size 5"])
def test_a_run_does_not_change_the_defaults_of_the_recipe(flags: str) -> None:
    defaults = Toy(size=4)
    parsed(defaults, flags).parts.append("wing")
    assert defaults == Toy(size=4)
    assert parsed(defaults).size == 4


# --- values


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("rate: -1e-3", "--rate=-1e-3"),
        ("loud: true", "--loud"),
        ("soft: false", "--no_soft"),
        ("stuffed: auto", "--stuffed auto"),
        ("stuffed: off", "--no_stuffed"),
        ("name: -x", "--name=-x"),
        ("name: ''", "--name ''"),
        ("parts: ['- a', '-b c']", "--parts '- a' '-b c'"),
        ("shifts: [1, -2]", "--shifts 1 -2"),
    ],
)
def test_a_yaml_value_has_the_meaning_of_the_flag(
    text: str, flags: str, yaml_file: YamlFile
) -> None:
    assert yaml_file.toy(text) == toy(flags)


@pytest.mark.parametrize("word", ["on", "007", "12:30:00", "2024-06-01", "1_000"])
def test_a_yaml_word_reaches_a_text_setting_as_it_is(word: str, yaml_file: YamlFile) -> None:
    assert yaml_file.toy(f"name: {word}").name == word


def test_a_value_has_the_type_of_its_field(yaml_file: YamlFile) -> None:
    config = yaml_file.toy("size: 7\nrate: 2\nloud: true\nshifts: [4]\nname: 3\n")
    expected = Toy(size=7, rate=2.0, loud=True, shifts=[4], name="3")
    assert repr(config) == repr(expected)
    assert yaml_file.toy(b"\xef\xbb\xbfsize: 7\n").size == 7, "a byte order mark"


@pytest.mark.parametrize("text", ["size: null", "size:", "size: ~", "", "---\n"])
def test_yaml_null_leaves_the_default(text: str, yaml_file: YamlFile) -> None:
    config = yaml_file.toy(text)
    assert config == Toy()
    assert resolved(settings_of(config))["size"]["from"] == "recipe"


def test_names_may_be_written_with_dashes(tmp_path: Path) -> None:
    path = tmp_path / "optim.yaml"
    path.write_text("max-steps: 7\n")
    assert parsed(OptimConfig(), "--max-steps 7").max_steps == 7
    assert parsed(OptimConfig(), f"--config {path}").max_steps == 7
    assert toy("--long-name Theodore").full_name == "Theodore", "an alias"
    of_transformers = "--load_best_model_at_end --metric_for_best_model eval_accuracy"
    assert parsed(EvalConfig(), of_transformers).metric_for_best_model == "eval/accuracy"


# --- mistakes


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        # Unknown names
        ("--sise 4", "--sise - did you mean --size?"),
        ("--qqqqqq 4", "--qqqqqq; "),
        ("-size 4", "-size - did you mean --size?"),
        ("--siz 4 --qqqqqq", "--siz - did you mean --size?; --qqqqqq; "),
        ("stray", "stray"),
        # Values of another type
        ("--size large", "--size"),
        ("--colour green", "--colour"),
        ("--loud stray", "--loud: 'stray'"),
        # No value
        ("--size", "--size: expected one argument; "),
        # Files
        ("--config absent.yaml", "absent.yaml"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_in_one_line(flags: str, named: str) -> None:
    assert named in toy_error(flags)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        # Unknown keys
        ("sise: 4", "--sise - did you mean --size?"),
        ("no_soft: true", "--no_soft"),
        # No flags at all
        ("size: [", "toy.yaml"),
        ("size: 3\n---\nsize: 4\n", "toy.yaml"),
        (b"name: \xff\xfe\n", "toy.yaml"),
        # Values of another type
        ("size:\n  width: 3\n", "'size'"),
        ("size: [1, 2]", "--size"),
        ("parts: []", "--parts"),
        ("soft: perhaps", "--soft"),
        # One key in two spellings
        ("long-name: a\nlong_name: b\n", "'long_name'"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_named_in_one_line_with_the_file(
    text: str | bytes, named: str, yaml_file: YamlFile
) -> None:
    message = yaml_file.error(text)
    assert str(yaml_file.path) in message
    assert named in message


def test_an_error_names_the_flag_by_its_first_name_and_the_file(tmp_path: Path) -> None:
    assert error_of(GPTConfig(), "--max_length 0").startswith("--block_size 0 ")

    path = tmp_path / "model.yaml"
    path.write_text("block_size: 1\n")
    message = error_of(ModelConfig(), f"--config {path}")
    assert message.startswith("--max_length 1 ")
    assert message.endswith(f"({path})")


@pytest.mark.parametrize(
    ("config", "name", "bad_values", "good_values"),
    [
        # The largest values keep a run from never ending, or from an overflow.
        (GPTConfig(), "n_layer", ["0", "-1", "10001", str(10**30)], ["1", "10000"]),
        (GPTConfig(n_embd=256), "n_head", ["0", "3", "300"], ["8"]),
        (GPTConfig(), "n_embd", ["0", "1000001"], ["4", "1000000"]),
        (GPTConfig(), "block_size", ["0", "100000001"], ["1", "100000000"]),
        (ModelConfig(), "max_length", ["1", "100000001"], ["2", "100000000"]),
        (ParallelConfig(), "ddp_timeout", ["0", "31536001"], ["1", "31536000"]),
        (GPTConfig(), "dropout", ["-0.1", "1", "nan", "inf"], ["0", "0.99"]),
        (DataConfig(), "global_batch_size", ["0", "-4", "10000001"], ["1", "10000000"]),
        (DataConfig(), "per_device_train_batch_size", ["0"], ["1"]),
        (DataConfig(), "eval_fraction", ["-0.1", "1", "1.5", "nan"], ["0", "0.99"]),
        (DataConfig(), "dataset", ["''"], ["x"]),
        (OptimConfig(), "max_steps", ["0"], ["1"]),
        (OptimConfig(), "learning_rate", ["-1", "nan", "inf", "1e308"], ["0", "2"]),
        (OptimConfig(), "weight_decay", ["-0.1", "nan", "inf"], ["0"]),
        (OptimConfig(), "adam_beta1", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig(), "adam_beta2", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig(), "max_grad_norm", ["0", "-1", "nan"], ["0.1"]),
        (OptimConfig(), "seed", ["-1", str(2**63)], ["0", str(2**63 - 1)]),
        (EvalConfig(), "eval_steps", ["-1"], ["0"]),
        (RunConfig(), "save_steps", ["0"], ["1"]),
        (RunConfig(), "save_total_limit", ["1"], ["2"]),
        (RunConfig(), "output_dir", ["''", "' '"], ["x"]),
        (RunConfig(), "report_to", ["mlflow"], ["none", "wandb"]),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_its_flag(
    config: Config, name: str, bad_values: list[str], good_values: list[str]
) -> None:
    for value in bad_values:
        assert f"--{name}" in error_of(config, f"--{name}={value}")
    for value in good_values:
        parsed(config, f"--{name}={value}")


# --- placeholders


def test_a_placeholder_in_the_name_of_a_run_is_the_value_of_that_flag(tmp_path: Path) -> None:
    path = tmp_path / "team.yaml"
    path.write_text(
        "output_dir: runs/{optim}-{learning_rate}-{run_name}\nmodel_name_or_path: a/b c\n"
    )
    sections = settings_of(RunConfig(), OptimConfig(), ModelConfig(), EvalConfig())
    flags = (
        f"--config {path} --learning_rate 1e-2 --optim muon --sample_prompts a b "
        "--run_name {model_name_or_path},{eval_steps},{sample_prompts} --eval_steps 5"
    )

    config = parse(sections, shlex.split(flags)).section0

    assert config.output_dir == "runs/muon-0.01-a-b-c,5,a-b"
    assert config.run_name == "a-b-c,5,a-b"
    assert config.origins["output_dir"] == str(path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (
            "{learning_rat}",
            "runs/{learning_rat}: no flag for a name is called 'learning_rat' - did you mean learning_rate?",
        ),
        ("{}", "runs/{}: no flag for a name is called ''; use another name"),
        ("{output_dir}", "runs/{output_dir}: no flag for a name is called 'output_dir'"),
        ("{learning_rate}", "runs/{learning_rate}: set --learning_rate, too"),
    ],
)
def test_a_placeholder_that_has_no_value_is_an_error(name: str, named: str) -> None:
    with pytest.raises(UserError, match=re.escape(named)):
        parse(settings_of(RunConfig(), OptimConfig()), ["--output_dir", f"runs/{name}"])


# --- help


Help = Callable[..., str]


@pytest.fixture
def help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    """Return the help of settings, in a terminal of 110 columns."""
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")

    def text(defaults: Any, option: str = "--help", description: str | None = None) -> str:
        with pytest.raises(SystemExit) as end:
            parse(defaults, [option], description)
        assert end.value.code == 0
        return capsys.readouterr().out

    return text


def test_help_shows_the_groups_and_the_defaults_of_the_recipe(help: Help) -> None:
    text = help(settings_of(Toy(size=42), Box()), description="Wins 50% of games.")

    assert "Wins 50% of games." in text
    assert "how large it is, 100% of the time (default: 42)" in text
    assert "{red,blue}" in text
    assert "--name WORD " in text
    assert "None" not in text

    # --stuffed belongs to a group of another config.
    words = ["--config", "toys:", "--size", "boxes:", "--lid", "--stuffed"]
    positions = [text.index(word) for word in words]
    assert positions[:-1] == sorted(positions[:-1])
    assert positions[-1] > text.index("boxes:")


@each_recipe
def test_help_of_a_recipe_shows_at_most_forty_flags_and_help_all_every_setting_once(
    recipe: Path, help: Help
) -> None:
    """People read no more. A new flag among them moves another one to --help_all."""
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    assert 25 <= len(re.findall(r"^  --\w+", help(defaults), re.MULTILINE)) <= 40

    listed = re.findall(r"^  --(?:no_)?(\w+)", help(defaults, "--help_all"), re.MULTILINE)
    for name in resolved(defaults):
        assert listed.count(name) == 1 or listed.count(f"no_{name}") == 1, name


# --- --print_config


def printed_config(
    capsys: pytest.CaptureFixture[str], defaults: Any, flags: list[str] | None = None
) -> str:
    with pytest.raises(SystemExit) as end:
        parse(defaults, [*(flags or []), "--print_config"])
    assert end.value.code == 0
    return capsys.readouterr().out


RECIPE_FLAGS = {
    "gpt.py": "--n_layer 2 --max_length 64 --mixture 0.7 0.3",
    "finetune.py": "--no_packing --lora_r 16 --max_length auto",
    "distill.py": "--teacher_model_name_or_path runs/teacher --beta 0.5 --sft_share 0.1",
    "preference.py": r"--packing auto --loss_type kto --freeze 'h\.[0-3]|: #'",
}


@each_recipe
def test_a_printed_config_results_in_the_same_settings(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    config = tmp_path / "config.yaml"
    config.write_text("learning_rate: 1e-7\neval_steps: 7\n")
    flags = shlex.split(
        f"--config {config} --eval_steps 8 --output_dir \"a 'b' # c\" --dataset a.txt 'x: [y]' "
        f"--sample_prompts null {RECIPE_FLAGS[recipe.name]}"
    )
    settings = parse(defaults, flags)

    printed = tmp_path / "printed.yaml"
    printed.write_text(printed_config(capsys, defaults, flags))
    settings_of_printed = parse(defaults, ["--config", str(printed)])

    assert settings_of_printed == settings
    # A default may still change with other settings, so it must not become a value of the user.
    for section, original in configs_of(settings).items():
        config_of_printed = configs_of(settings_of_printed)[section]
        assert config_of_printed.origins.keys() == original.origins.keys()


@each_recipe
def test_a_printed_config_has_every_setting_with_its_help(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]

    text = printed_config(capsys, defaults)

    assert max(len(line) for line in text.splitlines()) <= 100
    keys = re.findall(r"^# .*\n#(\w+):", text, re.MULTILINE)
    assert sorted(keys) == sorted(resolved(defaults))

    uncommented = tmp_path / "uncommented.yaml"
    uncommented.write_text(re.sub(r"^#(?=\w+:)", "", text, flags=re.MULTILINE))
    assert parse(defaults, ["--config", str(uncommented)]) == defaults
