"""The command line overrides YAML files, and they override the defaults of a recipe.

The settings of a test are those of Toy and Box, unless it needs a real config.
"""

import dataclasses
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest

from llmtrain.config.command_line import parse
from llmtrain.config.flag_parser import FlagParser
from llmtrain.config.flags import Config, configs_of, flag, resolved
from llmtrain.data.config import BatchConfig, DataConfig
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.parallel.config import ParallelConfig
from llmtrain.training.settings import EvalConfig, LogConfig, OptimConfig, RunConfig
from recipes import gpt

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


def values_of(settings: Any) -> dict[str, object]:
    return {name: entry["value"] for name, entry in resolved(settings).items()}


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
    path.write_text("size: 5\nrate: 0.25\n")
    defaults = settings_of(Toy(size=4, name="duck"), Box())

    settings = values_and_origins(parse(defaults, ["--size", "6", "--config", str(path)]))

    assert settings["size"] == (6, "command line")
    assert settings["rate"] == (0.25, str(path))
    assert settings["name"] == ("duck", "recipe")
    assert settings["lid"] == ("round", "recipe")


def test_config_files_and_flags_override_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_platform = tmp_path / "platform.yaml"
    of_platform.write_text("save_total_limit: 5\nreport_to: [tensorboard]\nsave_steps: 7\n")
    of_user = tmp_path / "user.yaml"
    of_user.write_text("save_steps: 8\n")
    monkeypatch.setenv("LLMTRAIN_CONFIG", str(of_platform))
    monkeypatch.setenv("LLMTRAIN_REPORT_TO", "none")

    settings = parse(settings_of(RunConfig()), ["--config", str(of_user)])
    values = values_and_origins(settings)
    assert values["report_to"] == (["none"], "LLMTRAIN_REPORT_TO")
    assert values["save_steps"] == (8, str(of_user))
    assert values["save_total_limit"] == (5, f"LLMTRAIN_CONFIG={of_platform}")

    config = parsed(RunConfig(), "--report_to wandb")
    assert config.report_to == ["wandb"]
    assert config.origins["report_to"] == "command line"


def test_an_error_names_the_variable_of_the_environment_that_causes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_REPORT_TO", "tensorboard,nothing")
    assert error_of(RunConfig()).endswith("(LLMTRAIN_REPORT_TO)")
    monkeypatch.delenv("LLMTRAIN_REPORT_TO")

    path = tmp_path / "platform.yaml"
    path.write_text("save_step: 5\n")
    monkeypatch.setenv("LLMTRAIN_CONFIG", str(path))
    assert error_of(RunConfig()).startswith(f"{path}: ")

    monkeypatch.setenv("LLMTRAIN_CONFIG", "absent.yaml")
    assert error_of(RunConfig()).startswith("LLMTRAIN_CONFIG=absent.yaml: ")


def test_a_setting_has_its_origin_even_if_its_value_equals_the_default(
    yaml_file: YamlFile,
) -> None:
    config = yaml_file.toy("rate: 0.5\n", "--size 3")
    settings = resolved(settings_of(config))
    assert settings["size"]["from"] == "command line"
    assert settings["rate"]["from"] == str(yaml_file.path)


def test_every_setting_of_every_config_is_resolved() -> None:
    settings = resolved(settings_of(Toy(), Box()))
    fields = [*dataclasses.fields(Toy), *dataclasses.fields(Box)]
    assert list(settings) == [field.name for field in fields]
    assert {setting["from"] for setting in settings.values()} == {"recipe"}


def test_without_argv_the_command_line_of_the_process_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["recipe.py", "--size", "8"])
    assert parse(settings_of(Toy())).section0.size == 8


def test_in_a_notebook_the_command_line_of_the_kernel_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["kernel.py", "-f", "kernel.json"])
    with pytest.raises(UserError):
        parse(settings_of(Toy()))

    kernel = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    assert parse(settings_of(Toy())).section0 == Toy()


def test_the_last_of_two_equal_flags_wins() -> None:
    assert toy("--size 1 --size 2").size == 2


def test_a_list_on_the_command_line_replaces_the_list_of_the_yaml_file(
    yaml_file: YamlFile,
) -> None:
    assert yaml_file.toy("parts: [a, b, c]", "--parts d").parts == ["d"]


def test_parsing_does_not_change_the_defaults_of_the_recipe() -> None:
    defaults = Toy(size=4)
    assert parsed(defaults, "--size 5").size == 5
    assert defaults.size == 4
    assert resolved(settings_of(defaults))["size"]["from"] == "recipe"
    assert parsed(defaults).size == 4


def test_two_configs_do_not_share_a_default_list() -> None:
    Toy().parts.append("wing")
    assert Toy().parts == ["head", "tail"]


@pytest.mark.parametrize("flags", ["", "--size 4"])
def test_a_list_that_a_run_changes_does_not_change_the_recipe(flags: str) -> None:
    defaults = Toy()
    parsed(defaults, flags).parts.append("wing")
    assert defaults.parts == ["head", "tail"]
    assert parsed(defaults, flags).parts == ["head", "tail"]


@each_recipe
def test_a_recipe_needs_no_flag(recipe: Path) -> None:
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    assert parse(defaults, []) == defaults


# --- values


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("size: 7", "--size 7"),
        ("size: -7", "--size -7"),
        ("rate: 1e-3", "--rate 1e-3"),
        ("rate: 1.0e-3", "--rate 0.001"),
        ("rate: 2", "--rate 2"),
        ("rate: -1.5", "--rate -1.5"),
        ("rate: -1e-3", "--rate -1e-3"),
        ("rate: -1e-3", "--rate=-1e-3"),
        ("rate: -1.0e-07", "--rate=-1e-7"),
        ("loud: true", "--loud"),
        ("loud: true", "--loud true"),
        ("loud: false", "--loud false"),
        ("loud: yes", "--loud yes"),
        ("soft: false", "--no_soft"),
        ("soft: 0", "--soft 0"),
        ("no_soft: true", "--no_soft"),
        ("no_soft: false", "--soft"),
        ("no_loud: true", "--no_loud"),
        ("no_stuffed: true", "--stuffed false"),
        ("colour: blue", "--colour blue"),
        ("name: -x", "--name=-x"),
        ("name: ''", "--name ''"),
        ("name: a b  c", "--name 'a b  c'"),
        ("name: 'ünï'", "--name ünï"),
        ("name: 3", "--name 3"),
        ("maker: none", "--maker none"),
        ("parts: [a, b]", "--parts a b"),
        ("parts: [a]", "--parts a"),
        ("parts: a", "--parts a"),
        ("parts: ['- a', '-b c']", "--parts '- a' '-b c'"),
        ("shifts: [1, -2]", "--shifts 1 -2"),
        ("shifts: [-2]", "--shifts -2"),
    ],
)
def test_a_yaml_value_has_the_meaning_of_the_flag(
    text: str, flags: str, yaml_file: YamlFile
) -> None:
    assert yaml_file.toy(text) == toy(flags)


@pytest.mark.parametrize(
    "word", ["on", "007", "12:30:00", "2024-06-01", "2024-99-99", "0x10", "1_000"]
)
def test_a_yaml_word_reaches_a_text_setting_as_it_is_written(
    word: str, yaml_file: YamlFile
) -> None:
    assert yaml_file.toy(f"name: {word}").name == word


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("size: 7", "size", 7),
        ("rate: 2", "rate", 2.0),
        ("loud: true", "loud", True),
        ("shifts: [4]", "shifts", [4]),
        ("name: 3", "name", "3"),
    ],
)
def test_a_value_has_the_type_of_its_field(
    line: str, name: str, value: object, yaml_file: YamlFile
) -> None:
    parsed_value = getattr(yaml_file.toy(line), name)
    assert parsed_value == value
    assert type(parsed_value) is type(value)


@pytest.mark.parametrize("text", ["size: null", "size:", "size: ~", "", "# nothing\n", "---\n"])
def test_yaml_null_leaves_the_default(text: str, yaml_file: YamlFile) -> None:
    config = yaml_file.toy(text)
    assert config == Toy()
    assert resolved(settings_of(config))["size"]["from"] == "recipe"


def test_a_yaml_file_may_begin_with_a_byte_order_mark(yaml_file: YamlFile) -> None:
    assert yaml_file.toy(b"\xef\xbb\xbfsize: 7\n").size == 7


def test_names_may_be_written_with_dashes(tmp_path: Path) -> None:
    path = tmp_path / "optim.yaml"
    path.write_text("max-steps: 7\n")
    assert parsed(OptimConfig(), "--max-steps 7").max_steps == 7
    assert parsed(OptimConfig(), f"--config {path}").max_steps == 7
    assert toy("--long-name Theodore").full_name == "Theodore", "an alias"


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("eval_loss", "eval/loss"),
        ("eval_accuracy", "eval/accuracy"),
        ("eval/perplexity", "eval/perplexity"),
    ],
)
def test_an_eval_metric_may_have_its_name_of_transformers(name: str, metric: str) -> None:
    config = parsed(EvalConfig(), f"--load_best_model_at_end --metric_for_best_model {name}")
    assert config.metric_for_best_model == metric


# --- unknown names


@pytest.mark.parametrize(
    ("flags", "unknown", "suggestion"),
    [
        ("--sise 4", "--sise", "--size"),
        ("--sise=4", "--sise", "--size"),
        ("--siz 4", "--siz", "--size"),
        ("--colou red", "--colou", "--colour"),
        ("--size 4 --shift 4", "--shift", "--shifts"),
    ],
)
def test_an_unknown_or_shortened_flag_is_an_error_with_the_nearest_name(
    flags: str, unknown: str, suggestion: str
) -> None:
    assert re.search(rf"{unknown}\b.* did you mean {suggestion}\?", toy_error(flags))


def test_an_unknown_flag_that_resembles_none_gets_no_suggestion() -> None:
    message = toy_error("--qqqqqq 4")
    assert "--qqqqqq" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("key", "suggestion"), [("sise", "size"), ("siz", "size"), ("colors", "colour")]
)
def test_an_unknown_yaml_key_is_an_error_with_the_nearest_name(
    key: str, suggestion: str, yaml_file: YamlFile
) -> None:
    message = yaml_file.error(f"{key}: 4")
    assert "toy.yaml" in message
    assert f"'{key}' - did you mean {suggestion}?" in message


@pytest.mark.parametrize(
    "key", ["config", "print_config", "help_all", "help", "h", "1", "--size", "null"]
)
def test_a_yaml_key_that_is_no_setting_is_an_error(key: str, yaml_file: YamlFile) -> None:
    assert "unknown key" in yaml_file.error(f"{key}: 4")


def test_an_unknown_yaml_key_is_an_error_even_if_its_value_is_null(yaml_file: YamlFile) -> None:
    assert "unknown key 'sise'" in yaml_file.error("sise:\n")


@pytest.mark.parametrize(
    ("flags", "word"), [("stray", "stray"), ("--size 4 stray", "stray"), ("-s 4", "-s")]
)
def test_a_word_that_belongs_to_no_flag_is_an_error(flags: str, word: str) -> None:
    assert word in toy_error(flags)


# --- wrong values


@pytest.mark.parametrize(
    "flags",
    [
        "--size large",
        "--size 2.5",
        "--rate much",
        "--loud perhaps",
        "--colour green",
        "--shifts 1 x",
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_its_flag(flags: str) -> None:
    flag_name, *_ = flags.split()
    assert flag_name in toy_error(flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--size", "--size needs a value: how large it is, 100% of the time;"),
        ("--parts", "--parts needs a value: its parts;"),
        ("--parts --size 4", "--parts needs a value: its parts;"),
        ("--secret", "--secret needs a value: a flag for programs;"),
    ],
)
def test_a_flag_without_its_value_is_an_error_with_its_meaning(flags: str, message: str) -> None:
    assert toy_error(flags).startswith(message)


@pytest.mark.parametrize(
    ("value", "requirement"),
    [("inf", "a finite number"), ("-inf", "at least 0"), ("nan", "a finite number")],
)
def test_an_infinite_value_is_not_called_too_small(value: str, requirement: str) -> None:
    message = error_of(OptimConfig(), f"--weight_decay={value}")
    assert message.endswith(f"is out of range: it must be {requirement}.")


@pytest.mark.parametrize(
    ("config", "name", "maximum"),
    [
        (GPTConfig(), "n_layer", 10_000),
        (GPTConfig(), "n_embd", 1_000_000),
        (GPTConfig(), "block_size", 100_000_000),
        (ModelConfig(), "max_length", 100_000_000),
        (BatchConfig(), "global_batch_size", 10_000_000),
        (ParallelConfig(), "ddp_timeout", 365 * 24 * 60 * 60),
    ],
)
def test_a_number_with_which_a_run_would_never_end_or_overflow_is_an_error(
    config: Config, name: str, maximum: int
) -> None:
    for value in (maximum + 1, 10**30):
        message = error_of(config, f"--{name} {value}")
        assert message == f"--{name} {value} is out of range: it must be at most {maximum:,}."
    parsed(config, f"--{name} {maximum}")


def test_a_learning_rate_that_a_float32_cannot_hold_is_an_error() -> None:
    message = error_of(OptimConfig(), "--learning_rate 1e308")
    assert message.endswith("is out of range: it must be at most 1,000,000.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size:\n  width: 3\n", "'size' must be a value or a list, not nested"),
        ("- size\n- 3\n", "toy.yaml must consist of"),
        ("just words", "toy.yaml must consist of"),
        ("size: [", "toy.yaml is not YAML"),
        ("size: 3\n---\nsize: 4\n", "toy.yaml is not YAML"),
        (b"name: \xff\xfe\n", "toy.yaml is not YAML"),
        ("size: !!python/object/apply:os.getcwd []", "toy.yaml: --size"),
        (f"size: {'9' * 5000}", "toy.yaml"),
        ("size: large", "toy.yaml: --size"),
        ("size: 2.5", "toy.yaml: --size"),
        ("size: true", "toy.yaml: --size"),
        ("size: []", "toy.yaml: --size"),
        ("size: [1, 2]", "toy.yaml: 'size' takes a single value, not a list."),
        ("parts: []", "toy.yaml: --parts"),
        ("loud: []", "toy.yaml"),
        ("loud: [true, false]", "toy.yaml: 'loud' takes a single value, not a list."),
        ("loud: perhaps", "toy.yaml: --loud"),
        ("no_soft: perhaps", "toy.yaml: --soft"),
        ("colour: green", "toy.yaml: --colour"),
    ],
)
def test_bad_yaml_is_an_error_of_one_line_that_names_the_file(
    text: str | bytes, message: str, yaml_file: YamlFile
) -> None:
    assert message in yaml_file.error(text)


def test_a_yaml_key_in_two_spellings_is_set_twice(tmp_path: Path) -> None:
    path = tmp_path / "optim.yaml"
    path.write_text("max_steps: 3\nmax-steps: 4\n")
    with pytest.raises(UserError, match="'max_steps' is set twice"):
        parse(gpt.DEFAULTS, ["--config", str(path)])


def test_a_config_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    assert "absent.yaml" in toy_error(f"--config {tmp_path}/absent.yaml")
    assert str(tmp_path) in toy_error(f"--config {tmp_path}"), "a folder"
    assert "--config" in toy_error("--config")


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (GPTConfig(), "--max_length 0", "--block_size 0 is out of range"),
        (GPTConfig(), "--max-length=x", "--block_size: invalid int value: 'x'"),
        (ModelConfig(), "--block_size 1", "--max_length 1 is out of range"),
        (ModelConfig(), "--block_size x", "--max_length: 'x' is neither"),
        (ModelConfig(), "--max_length 1", "--max_length 1 is out of range"),
        (RunConfig(), "--save-steps 0", "--save_steps 0 is out of range"),
        (RunConfig(), "--push_to_hub", "--push_to_hub needs a value: upload"),
        (RunConfig(), "--push_to_hub true", "--push_to_hub true: name the repository"),
    ],
)
def test_an_error_names_the_flag_by_its_first_name(
    config: Config, flags: str, message: str
) -> None:
    assert error_of(config, flags).startswith(message)


def test_an_error_of_a_yaml_file_names_the_flag_by_its_first_name(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("block_size: 1\n")

    message = error_of(ModelConfig(), f"--config {path}")

    assert message.startswith("--max_length 1 is out of range")
    assert message.endswith(f"({path})")


@pytest.mark.parametrize(
    ("config", "name", "bad_values", "good_values"),
    [
        (GPTConfig(), "n_layer", ["0", "-1"], ["1"]),
        (GPTConfig(), "n_embd", ["0"], ["4"]),
        (GPTConfig(), "block_size", ["0"], ["1"]),
        (GPTConfig(), "dropout", ["-0.1", "1", "nan", "inf"], ["0", "0.99"]),
        (DataConfig(), "global_batch_size", ["0", "-4"], ["1"]),
        (DataConfig(), "per_device_train_batch_size", ["0"], ["1"]),
        (DataConfig(), "eval_fraction", ["-0.1", "1", "1.5", "nan"], ["0", "0.99"]),
        (DataConfig(), "dataset", ["''"], ["x"]),
        (DataConfig(), "tokenizer", ["''"], ["char"]),
        (OptimConfig(), "max_steps", ["0"], ["1"]),
        (OptimConfig(), "learning_rate", ["-1", "nan", "inf"], ["0", "2"]),
        (OptimConfig(), "warmup_steps", ["-1"], ["0"]),
        (OptimConfig(), "weight_decay", ["-0.1", "nan", "inf"], ["0"]),
        (OptimConfig(), "adam_beta1", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig(), "adam_beta2", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig(), "max_grad_norm", ["0", "-1", "nan"], ["0.1"]),
        (OptimConfig(), "seed", ["-1", str(2**63)], ["0", str(2**63 - 1)]),
        (LogConfig(), "logging_steps", ["0"], ["1"]),
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


@pytest.mark.parametrize(("n_head", "n_embd"), [(3, 256), (5, 64), (300, 256), (7, 13), (2, 1)])
def test_heads_that_do_not_divide_the_width_are_an_error_with_values_that_do(
    n_head: int, n_embd: int
) -> None:
    with pytest.raises(UserError) as caught:
        GPTConfig(n_head=n_head, n_embd=n_embd)

    suggestions = re.search(
        r"use one of --n_head ([\d, ]+), or --n_embd (\d+)\.", str(caught.value)
    )
    assert suggestions
    suggested_heads, suggested_width = suggestions.groups()
    for heads in suggested_heads.split(", "):
        GPTConfig(n_head=int(heads), n_embd=n_embd)
    GPTConfig(n_head=n_head, n_embd=int(suggested_width))


# --- several mistakes at once


def test_all_unknown_flags_are_named_at_once() -> None:
    assert toy_error("--sise 4 -1 --size 3 --qqqqqq --colou=red") == (
        "unknown flags: --sise (did you mean --size?), --qqqqqq, --colou (did you mean --colour?); "
        "--help lists the flags."
    )


def test_all_unknown_yaml_keys_are_named_at_once(yaml_file: YamlFile) -> None:
    message = yaml_file.error("sise: 4\nsize: 3\nqqqqqq: [a]\ncolou:\n  deep: red\n")
    assert message.endswith(
        "toy.yaml: unknown keys: 'sise' (did you mean size?), 'qqqqqq', "
        "'colou' (did you mean colour?); --help lists the flags."
    )


def test_wrong_values_hide_neither_each_other_nor_unknown_flags() -> None:
    message = toy_error("--size big --sise 4 --colour=green --qqqqqq --shifts 1 x")
    assert message.startswith("--size: invalid int value: 'big'; --colour: invalid choice: 'green'")
    assert "; --shifts: invalid int value: 'x'; unknown flags: --sise (did you" in message
    assert message.endswith(" --qqqqqq; --help lists the flags.")


def test_a_flag_without_its_value_hides_no_unknown_flag() -> None:
    assert toy_error("--sise 4 --size") == (
        "--size needs a value: how large it is, 100% of the time; "
        "unknown flag --sise - did you mean --size? --help lists the flags."
    )


def test_a_long_name_with_a_single_dash_is_an_unknown_flag() -> None:
    message = toy_error("-help --sise 4")
    assert message.startswith("unknown flags: -help (did you mean --help?), --sise (did you")


def test_a_stray_word_hides_no_unknown_flag() -> None:
    assert toy_error("stray --sise 4") == (
        "'stray' is neither a flag nor the value of one; "
        "unknown flag --sise - did you mean --size? --help lists the flags."
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("size: big", "--size: invalid int value: 'big'"),
        ("size: {width: 3}", "'size' must be a value or a list, not nested keys"),
        ("parts: []", "--parts is an empty list; give a value or leave the key out"),
        ("no_soft: perhaps", "--soft: 'perhaps' is not a value of this switch: use true or false"),
        ("name: a\nname: b", "'name' is set twice; remove one of the lines"),
    ],
)
def test_a_wrong_value_in_a_yaml_file_hides_no_unknown_key(
    line: str, problem: str, yaml_file: YamlFile
) -> None:
    assert yaml_file.error(f"{line}\nsise: 4\n") == (
        f"{yaml_file.path}: {problem}; unknown key 'sise' - did you mean size? "
        "--help lists the flags."
    )


def test_mistakes_of_the_command_line_and_of_a_yaml_file_are_named_together(
    yaml_file: YamlFile,
) -> None:
    message = yaml_file.error("colour: green\nqqqqqq: 3\n", "--rate much --sise=4")

    of_command_line, _, of_file = message.partition(f"{yaml_file.path}: ")
    assert of_command_line == (
        "--rate: invalid float value: 'much'; unknown flag --sise - did you mean --size?; "
    )
    assert of_file.startswith("--colour: invalid choice: 'green'")
    assert of_file.endswith("; unknown key 'qqqqqq'; --help lists the flags.")


# --- help


class Help:
    """Prints the help of settings in a terminal of 110 columns."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        monkeypatch.setenv("COLUMNS", "110")
        monkeypatch.setenv("NO_COLOR", "1")

    def text(self, defaults: Any, flag: str = "--help", description: str | None = None) -> str:
        with pytest.raises(SystemExit) as end:
            parse(defaults, [flag], description)
        assert end.value.code == 0
        return self.capsys.readouterr().out


@pytest.fixture
def help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Help:
    return Help(capsys, monkeypatch)


def test_help_shows_the_groups_and_the_defaults_of_the_recipe(help: Help) -> None:
    text = help.text(settings_of(Toy(size=42), Box()), description="Wins 50% of games.")

    assert "Wins 50% of games." in text
    assert "--config" in text
    assert "how large it is, 100% of the time (default: 42)" in text
    assert "{red,blue}" in text
    assert "--name WORD " in text
    assert "--maker MAKER " in text
    assert "None" not in text

    # --stuffed belongs to a group of another config.
    headings_and_flags = ["toys:", "--size", "boxes:", "--lid"]
    positions = [text.index(word) for word in headings_and_flags]
    assert positions == sorted(positions)
    assert text.index("boxes:") < text.index("--stuffed")


def test_help_shows_a_hidden_flag_only_with_help_all(help: Help) -> None:
    defaults = settings_of(Toy())
    assert "--secret" not in help.text(defaults)
    assert "--secret" in help.text(defaults, flag="--help_all")


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["soft", "loud", "stuffed"])  # by default True, False and None
def test_help_shows_a_switch_by_the_flag_that_changes_the_recipe(
    name: str, value: bool, help: Help
) -> None:
    recipe = settings_of(Toy(**{name: value}))
    changing_flag = f"--no_{name}" if value else f"--{name}"

    text = help.text(recipe)

    assert re.findall(rf"--(?:no_)?{name}\b", text) == [changing_flag]
    shown_names = [flag.shown_name for flag in FlagParser(configs_of(recipe)).flags]
    assert changing_flag in shown_names
    assert getattr(parse(recipe, [changing_flag]).section0, name) is not value


def test_a_flag_without_help_is_listed(help: Help) -> None:
    @dataclass
    class Own(Config):
        group: ClassVar[str] = "own"

        plain: str | None = flag(None, "")
        counted: int = flag(3, "")

    text = help.text(settings_of(Own()))

    assert "\n  --plain PLAIN" in text
    assert "(default: 3)" in text


@each_recipe
def test_help_of_a_recipe_shows_at_most_forty_flags(recipe: Path, help: Help) -> None:
    """People read no more. A new flag among them moves another one to --help_all."""
    text = help.text(runpy.run_path(str(recipe))["DEFAULTS"])
    flags = re.findall(r"^  --\w+", text, re.MULTILINE)
    assert 25 <= len(flags) <= 40


@each_recipe
def test_help_all_of_a_recipe_lists_every_setting_once(recipe: Path, help: Help) -> None:
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    configs = configs_of(defaults).values()

    text = help.text(defaults, flag="--help_all")

    for config in configs:
        assert f"{config.group}:" in text
        for field in dataclasses.fields(config):
            lines = re.findall(rf"^  --(no_)?{field.name}\b", text, re.MULTILINE)
            assert len(lines) == 1, field.name


@pytest.mark.parametrize("columns", ["", "abc", "5", "10000"])
def test_an_odd_terminal_width_does_not_stop_a_run(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert toy("--size 4").size == 4


# --- --print_config


def printed_config(
    capsys: pytest.CaptureFixture[str], defaults: Any, flags: list[str] | None = None
) -> str:
    with pytest.raises(SystemExit) as end:
        parse(defaults, [*(flags or []), "--print_config"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_only_the_first_rank_prints_a_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert printed_config(capsys, settings_of(Toy())) == ""


RECIPE_FLAGS = {
    "gpt.py": "--n_layer 2 --max_length 64 --mixture 0.7 0.3",
    "finetune.py": "--no_packing --lora_r 16 --max_length auto",
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
    keys = re.findall(r"^#(\w+):", text, re.MULTILINE)
    assert sorted(keys) == sorted(values_of(defaults))
    assert "# random seed of the initial weights, the data order and dropout\n#seed: 0\n" in text
    assert "\n# --- batch and memory\n" in text

    uncommented = tmp_path / "uncommented.yaml"
    uncommented.write_text(re.sub(r"^#(?=\w+:)", "", text, flags=re.MULTILINE))
    assert values_of(parse(defaults, ["--config", str(uncommented)])) == values_of(defaults)
