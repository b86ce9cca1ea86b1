"""Recipe default < YAML < command line: one set of names, one coercion, one kind of error."""

import dataclasses
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import pytest

from llmtrain.config.command_line import parse
from llmtrain.config.flag_parser import FlagParser
from llmtrain.config.flags import Config, configs_of, flag, resolved
from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.training.settings import EvalConfig, LogConfig, OptimConfig, RunConfig
from recipes import gpt

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("[!_]*.py"))


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
    secret: int = flag(1, "what only programs ask for", hidden=True)
    stuffed: bool | None = flag(None, "whether it is stuffed", group="boxes")
    full_name: str | None = flag(None, "its full name", alias="long_name")


@dataclass
class Box(Config):
    group: ClassVar[str] = "boxes"

    lid: str = flag("round", "a lid")


def together(*configs: Config):
    """Settings that hold these configs."""
    names = [f"part{i}" for i in range(len(configs))]
    return dataclasses.make_dataclass("Together", names)(*configs)


def parsed(*configs: Config, argv: list[str] | None = None):
    return [*configs_of(parse(together(*configs), argv)).values()]


def values_and_origins(settings) -> dict[str, tuple[object, str]]:
    return {name: (entry["value"], entry["from"]) for name, entry in resolved(settings).items()}


def toy(*argv: str) -> Toy:
    return parsed(Toy(), argv=list(argv))[0]


def from_yaml(tmp_path: Path, text: str | bytes, *argv: str) -> Toy:
    path = tmp_path / "toy.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return toy("--config", str(path), *argv)


def complaint(call, *arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message
    return message


def test_the_recipe_gives_way_to_yaml_and_yaml_to_the_command_line(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text("size: 5\nrate: 0.25\n")
    settings = values_and_origins(
        parse(together(Toy(size=4, name="duck"), Box()), ["--size", "6", "--config", str(path)])
    )
    assert settings["size"] == (6, "command line")
    assert settings["rate"] == (0.25, str(path))
    assert settings["name"] == ("duck", "recipe")
    assert settings["lid"] == ("round", "recipe")


def test_the_environment_gives_way_to_a_config_file_and_to_the_command_line(tmp_path, monkeypatch):
    platform = tmp_path / "platform.yaml"
    platform.write_text("save_total_limit: 5\nreport_to: [tensorboard]\nsave_steps: 7\n")
    own = tmp_path / "own.yaml"
    own.write_text("save_steps: 8\n")
    monkeypatch.setenv("LLMTRAIN_CONFIG", str(platform))
    monkeypatch.setenv("LLMTRAIN_REPORT_TO", "none")
    settings = parse(together(RunConfig()), ["--config", str(own)])
    values = values_and_origins(settings)
    assert values["report_to"] == (["none"], "LLMTRAIN_REPORT_TO")
    assert values["save_steps"] == (8, str(own))
    assert values["save_total_limit"] == (5, f"LLMTRAIN_CONFIG={platform}")
    run = parsed(RunConfig(), argv=["--report_to", "wandb"])[0]
    assert (run.report_to, run.origins["report_to"]) == (["wandb"], "command line")

    monkeypatch.setenv("LLMTRAIN_REPORT_TO", "tensorboard,nothing")
    assert complaint(parsed, RunConfig(), argv=[]).endswith("(LLMTRAIN_REPORT_TO)")
    monkeypatch.delenv("LLMTRAIN_REPORT_TO")
    platform.write_text("save_step: 5\n")
    assert complaint(parsed, RunConfig(), argv=[]).startswith(f"{platform}: ")
    monkeypatch.setenv("LLMTRAIN_CONFIG", "absent.yaml")
    assert complaint(parsed, RunConfig(), argv=[]).startswith("LLMTRAIN_CONFIG=absent.yaml: ")


def test_a_value_that_was_given_says_so_even_where_it_equals_the_default(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text("rate: 0.5\n")
    settings = resolved(parse(together(Toy()), ["--config", str(path), "--size", "3"]))
    assert (settings["size"]["from"], settings["rate"]["from"]) == ("command line", str(path))


def test_every_setting_of_every_config_is_resolved():
    settings = resolved(together(Toy(), Box()))
    assert list(settings) == [
        field.name for config in (Toy, Box) for field in dataclasses.fields(config)
    ]
    assert {setting["from"] for setting in settings.values()} == {"recipe"}


def test_without_argv_the_command_line_of_the_process_is_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["recipe.py", "--size", "8"])
    assert parsed(Toy())[0].size == 8


def test_the_last_of_two_equal_flags_wins():
    assert toy("--size", "1", "--size", "2").size == 2


def test_a_list_on_the_command_line_replaces_the_list_of_the_yaml_file(tmp_path):
    assert from_yaml(tmp_path, "parts: [a, b, c]", "--parts", "d").parts == ["d"]


@pytest.mark.parametrize(
    ("argv", "named", "meant"),
    [
        (["--sise", "4"], "--sise", "--size"),
        (["--sise=4"], "--sise", "--size"),
        (["--siz", "4"], "--siz", "--size"),
        (["--colou", "red"], "--colou", "--colour"),
        (["--size", "4", "--shift", "4"], "--shift", "--shifts"),
    ],
)
def test_an_unknown_or_shortened_flag_is_an_error_with_the_nearest_name(argv, named, meant):
    message = complaint(toy, *argv)
    assert re.search(rf"{named}\b.* did you mean {meant}\?", message)


def test_an_unknown_flag_that_resembles_none_gets_no_suggestion():
    message = complaint(toy, "--qqqqqq", "4")
    assert "--qqqqqq" in message
    assert "did you mean" not in message


def test_all_unknown_flags_are_named_at_once():
    message = complaint(toy, "--sise", "4", "-1", "--size", "3", "--qqqqqq", "--colou=red")
    assert message == (
        "unknown flags: --sise (did you mean --size?), --qqqqqq, --colou (did you mean --colour?); "
        "--help lists the flags."
    )


def test_all_unknown_yaml_keys_are_named_at_once(tmp_path):
    message = complaint(from_yaml, tmp_path, "sise: 4\nsize: 3\nqqqqqq: [a]\ncolou:\n  deep: red\n")
    assert message.endswith(
        "toy.yaml: unknown keys: 'sise' (did you mean size?), 'qqqqqq', "
        "'colou' (did you mean colour?); --help lists the flags."
    )


def test_wrong_values_hide_neither_each_other_nor_unknown_flags():
    message = complaint(
        toy, "--size", "big", "--sise", "4", "--colour=green", "--qqqqqq", "--shifts", "1", "x"
    )
    assert message.startswith("--size: invalid int value: 'big'; --colour: invalid choice: 'green'")
    assert "; --shifts: invalid int value: 'x'; unknown flags: --sise (did you" in message
    assert message.endswith(" --qqqqqq; --help lists the flags.")


def test_a_flag_without_its_value_hides_no_unknown_flag():
    assert complaint(toy, "--sise", "4", "--size") == (
        "--size needs a value: how large it is, 100% of the time; "
        "unknown flag --sise - did you mean --size? --help lists the flags."
    )


def test_a_long_name_with_a_single_dash_is_an_unknown_flag():
    message = complaint(toy, "-help", "--sise", "4")
    assert message.startswith("unknown flags: -help (did you mean --help?), --sise (did you")


def test_a_stray_word_hides_no_unknown_flag():
    assert complaint(toy, "stray", "--sise", "4") == (
        "'stray' is neither a flag nor the value of one; "
        "unknown flag --sise - did you mean --size? --help lists the flags."
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("size: big", "--size: invalid int value: 'big'"),
        ("size: {width: 3}", "'size' must be a value or a list, not nested keys"),
        ("parts: []", "--parts is an empty list; give a value or leave the key out"),
        (
            "no_soft: perhaps",
            "--soft: 'perhaps' is not a value of this switch: use true or false",
        ),
        ("name: a\nname: b", "'name' is set twice; remove one of the lines"),
    ],
)
def test_a_wrong_value_in_a_yaml_file_hides_no_unknown_key(tmp_path, line, problem):
    message = complaint(from_yaml, tmp_path, f"{line}\nsise: 4\n")
    assert message == (
        f"{tmp_path / 'toy.yaml'}: {problem}; unknown key 'sise' - did you mean size? "
        "--help lists the flags."
    )


def test_the_command_line_and_a_yaml_file_do_not_hide_each_other_s_mistakes(tmp_path):
    message = complaint(
        from_yaml, tmp_path, "colour: green\nqqqqqq: 3\n", "--rate", "much", "--sise=4"
    )
    beginning, _, of_file = message.partition(f"{tmp_path / 'toy.yaml'}: ")
    assert beginning == (
        "--rate: invalid float value: 'much'; unknown flag --sise - did you mean --size?; "
    )
    assert of_file.startswith("--colour: invalid choice: 'green'")
    assert of_file.endswith("; unknown key 'qqqqqq'; --help lists the flags.")


@pytest.mark.parametrize("argv", [["stray"], ["--size", "4", "stray"], ["-s", "4"]])
def test_a_word_that_belongs_to_no_flag_is_an_error(argv):
    assert re.search(r"stray|-s", complaint(toy, *argv))


@pytest.mark.parametrize(
    ("key", "meant"), [("sise", "size"), ("siz", "size"), ("colors", "colour")]
)
def test_an_unknown_yaml_key_is_an_error_with_the_nearest_name(tmp_path, key, meant):
    message = complaint(from_yaml, tmp_path, f"{key}: 4")
    assert "toy.yaml" in message
    assert f"'{key}' - did you mean {meant}?" in message


@pytest.mark.parametrize(
    "key", ["config", "print_config", "help_all", "help", "h", "1", "--size", "null"]
)
def test_a_yaml_key_that_is_no_setting_is_an_error(tmp_path, key):
    assert "unknown key" in complaint(from_yaml, tmp_path, f"{key}: 4")


def test_an_unknown_yaml_key_is_an_error_even_where_its_value_is_null(tmp_path):
    assert "unknown key 'sise'" in complaint(from_yaml, tmp_path, "sise:\n")


@pytest.mark.parametrize("text", ["size: null", "size:", "size: ~", "", "# nothing\n", "---\n"])
def test_yaml_null_leaves_a_setting_out(tmp_path, text):
    config = from_yaml(tmp_path, text)
    assert config == Toy()
    assert resolved(together(config))["size"]["from"] == "recipe"


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("size: 7", ["--size", "7"]),
        ("size: -7", ["--size", "-7"]),
        ("rate: 1e-3", ["--rate", "1e-3"]),
        ("rate: 1.0e-3", ["--rate", "0.001"]),
        ("rate: 2", ["--rate", "2"]),
        ("rate: -1.5", ["--rate", "-1.5"]),
        ("rate: -1e-3", ["--rate=-1e-3"]),
        ("rate: -1.0e-07", ["--rate=-1e-7"]),
        ("loud: true", ["--loud"]),
        ("loud: true", ["--loud", "true"]),
        ("loud: false", ["--loud", "false"]),
        ("loud: yes", ["--loud", "yes"]),
        ("soft: false", ["--no_soft"]),
        ("soft: 0", ["--soft", "0"]),
        ("no_soft: true", ["--no_soft"]),
        ("no_soft: false", ["--soft"]),
        ("no_loud: true", ["--no_loud"]),
        ("no_stuffed: true", ["--stuffed", "false"]),
        ("colour: blue", ["--colour", "blue"]),
        ("name: -x", ["--name=-x"]),
        ("name: ''", ["--name", ""]),
        ("name: a b  c", ["--name", "a b  c"]),
        ("name: 'ünï'", ["--name", "ünï"]),
        ("name: 3", ["--name", "3"]),
        ("maker: none", ["--maker", "none"]),
        ("parts: [a, b]", ["--parts", "a", "b"]),
        ("parts: [a]", ["--parts", "a"]),
        ("parts: a", ["--parts", "a"]),
        ("shifts: [1, -2]", ["--shifts", "1", "-2"]),
        ("shifts: [-2]", ["--shifts", "-2"]),
        ("rate: -1e-3", ["--rate", "-1e-3"]),
        ("parts: ['- a', '-b c']", ["--parts", "- a", "-b c"]),
    ],
)
def test_a_yaml_value_becomes_what_the_flag_would(tmp_path, text, argv):
    assert from_yaml(tmp_path, text) == toy(*argv)


@pytest.mark.parametrize(
    "word", ["on", "007", "12:30:00", "2024-06-01", "2024-99-99", "0x10", "1_000"]
)
def test_a_yaml_word_reaches_a_text_setting_as_it_is_written(tmp_path, word):
    assert from_yaml(tmp_path, f"name: {word}").name == word


def test_a_value_that_is_not_finite_is_not_called_too_small():
    for value, reason in (
        ("inf", "a finite number"),
        ("-inf", "at least 0"),
        ("nan", "a finite number"),
    ):
        message = complaint(parsed, OptimConfig(), argv=[f"--weight_decay={value}"])
        assert message.endswith(f"is out of range: it must be {reason}.")


def test_coerced_values_have_the_type_of_their_field(tmp_path):
    config = from_yaml(tmp_path, "size: 7\nrate: 2\nloud: true\nshifts: [4]\nname: 3\n")
    assert [
        type(v) for v in (config.size, config.rate, config.loud, config.shifts[0], config.name)
    ] == [*(int, float, bool, int, str)]


def test_a_yaml_file_may_begin_with_a_byte_order_mark(tmp_path):
    assert from_yaml(tmp_path, b"\xef\xbb\xbfsize: 7\n").size == 7


def test_names_may_be_written_with_dashes(tmp_path):
    assert parsed(OptimConfig(), argv=["--max-steps", "7"])[0].max_steps == 7
    path = tmp_path / "c.yaml"
    path.write_text("max-steps: 7\n")
    assert parsed(OptimConfig(), argv=["--config", str(path)])[0].max_steps == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size:\n  width: 3\n", "'size' must be a value or a list, not nested"),
        ("- size\n- 3\n", "toy.yaml must consist of"),
        ("just words", "toy.yaml must consist of"),
        ("size: [", "toy.yaml is not YAML"),
        ("size: 3\n---\nsize: 4\n", "toy.yaml is not YAML"),
        ("size: !!python/object/apply:os.getcwd []", "toy.yaml: --size"),
        ("no_soft: perhaps", "toy.yaml: --soft"),
        (b"name: \xff\xfe\n", "toy.yaml is not YAML"),
        ("size: large", "toy.yaml: --size"),
        ("size: 2.5", "toy.yaml: --size"),
        ("size: true", "toy.yaml: --size"),
        ("size: [1, 2]", "toy.yaml: 'size' takes a single value, not a list."),
        ("loud: [true, false]", "toy.yaml: 'loud' takes a single value, not a list."),
        ("size: []", "toy.yaml: --size"),
        ("parts: []", "toy.yaml: --parts"),
        ("loud: perhaps", "toy.yaml: --loud"),
        ("colour: green", "toy.yaml: --colour"),
    ],
)
def test_bad_yaml_is_an_error_of_one_line_that_names_the_file(tmp_path, text, said):
    assert said in complaint(from_yaml, tmp_path, text)


def test_an_empty_yaml_list_does_not_switch_a_flag_on(tmp_path):
    assert "toy.yaml" in complaint(from_yaml, tmp_path, "loud: []")


def test_a_yaml_number_too_long_for_python_is_an_error_of_one_line(tmp_path):
    assert "toy.yaml" in complaint(from_yaml, tmp_path, f"size: {'9' * 5000}")


def test_a_config_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path):
    assert "absent.yaml" in complaint(toy, "--config", str(tmp_path / "absent.yaml"))
    assert str(tmp_path) in complaint(toy, "--config", str(tmp_path))
    assert "--config" in complaint(toy, "--config")


@pytest.mark.parametrize(
    "argv",
    [
        ["--size", "large"],
        ["--size", "2.5"],
        ["--size"],
        ["--rate", "much"],
        ["--loud", "perhaps"],
        ["--colour", "green"],
        ["--parts"],
        ["--shifts", "1", "x"],
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error_that_names_its_flag(argv):
    assert argv[0] in complaint(toy, *argv)


@pytest.mark.parametrize("argv", [["--size"], ["--parts", "--size", "4"], ["--secret"]])
def test_a_flag_without_its_value_is_answered_with_its_meaning(argv):
    meaning = {"--size": "how large it is, 100% of the time", "--parts": "its parts"}
    wanted = meaning.get(argv[0], "what only programs ask for")
    assert complaint(toy, *argv).startswith(f"{argv[0]} needs a value: {wanted};")


def test_an_alias_may_be_written_with_dashes():
    assert toy("--long-name", "Theodore").full_name == "Theodore"


@pytest.mark.parametrize(
    ("config", "argv", "named"),
    [
        (GPTConfig(), ["--max_length", "0"], "--block_size 0 is out of range"),
        (GPTConfig(), ["--max-length=x"], "--block_size: invalid int value: 'x'"),
        (ModelConfig(), ["--block_size", "1"], "--max_length 1 is out of range"),
        (ModelConfig(), ["--block_size", "x"], "--max_length: 'x' is neither"),
        (ModelConfig(), ["--max_length", "1"], "--max_length 1 is out of range"),
        (RunConfig(), ["--save-steps", "0"], "--save_steps 0 is out of range"),
        (RunConfig(), ["--push_to_hub"], "--push_to_hub needs a value: upload"),
        (RunConfig(), ["--push_to_hub", "true"], "--push_to_hub true: name the repository"),
    ],
)
def test_an_error_names_the_flag_by_its_own_name(config, argv, named):
    assert complaint(parsed, config, argv=argv).startswith(named)


@pytest.mark.parametrize(
    ("word", "metric"),
    [
        ("eval_loss", "eval/loss"),
        ("eval_accuracy", "eval/accuracy"),
        ("eval/perplexity", "eval/perplexity"),
    ],
)
def test_an_eval_metric_may_be_written_as_in_transformers(word, metric):
    argv = ["--load_best_model_at_end", "--metric_for_best_model", word]
    assert parsed(EvalConfig(), argv=argv)[0].metric_for_best_model == metric


def test_an_error_names_the_file_of_a_flag_that_is_written_with_its_other_name(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("block_size: 1\n")
    message = complaint(parsed, ModelConfig(), argv=["--config", str(path)])
    assert message.startswith("--max_length 1 is out of range")
    assert message.endswith(f"({path})")


@pytest.mark.parametrize(
    ("owner", "name", "bad", "good"),
    [
        (GPTConfig, "n_layer", ["0", "-1"], ["1"]),
        (GPTConfig, "n_embd", ["0"], ["4"]),
        (GPTConfig, "block_size", ["0"], ["1"]),
        (GPTConfig, "dropout", ["-0.1", "1", "nan", "inf"], ["0", "0.99"]),
        (DataConfig, "global_batch_size", ["0", "-4"], ["1"]),
        (DataConfig, "per_device_train_batch_size", ["0"], ["1"]),
        (DataConfig, "eval_fraction", ["-0.1", "1", "1.5", "nan"], ["0", "0.99"]),
        (DataConfig, "dataset", [""], ["x"]),
        (DataConfig, "tokenizer", [""], ["char"]),
        (OptimConfig, "max_steps", ["0"], ["1"]),
        (OptimConfig, "learning_rate", ["-1", "nan", "inf"], ["0", "2"]),
        (OptimConfig, "warmup_steps", ["-1"], ["0"]),
        (OptimConfig, "weight_decay", ["-0.1", "nan", "inf"], ["0"]),
        (OptimConfig, "adam_beta1", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig, "adam_beta2", ["-0.1", "1", "nan"], ["0", "0.9"]),
        (OptimConfig, "max_grad_norm", ["0", "-1", "nan"], ["0.1"]),
        (OptimConfig, "seed", ["-1", str(2**63)], ["0", str(2**63 - 1)]),
        (LogConfig, "logging_steps", ["0"], ["1"]),
        (EvalConfig, "eval_steps", ["-1"], ["0"]),
        (RunConfig, "save_steps", ["0"], ["1"]),
        (RunConfig, "save_total_limit", ["1"], ["2"]),
        (RunConfig, "output_dir", ["", " "], ["x"]),
        (RunConfig, "report_to", ["mlflow"], ["none", "wandb"]),
    ],
)
def test_a_number_out_of_range_is_an_error_that_names_its_flag(owner, name, bad, good):
    for word in bad:
        assert f"--{name}" in complaint(parsed, owner(), argv=[f"--{name}={word}"])
    for word in good:
        parsed(owner(), argv=[f"--{name}={word}"])


@pytest.mark.parametrize(("heads", "width"), [(3, 256), (5, 64), (300, 256), (7, 13), (2, 1)])
def test_heads_that_do_not_divide_the_width_are_answered_with_values_that_do(heads, width):
    message = complaint(GPTConfig, n_head=heads, n_embd=width)
    named = re.search(r"use one of --n_head ([\d, ]+), or --n_embd (\d+)\.", message)
    assert named
    for other in named[1].split(", "):
        GPTConfig(n_head=int(other), n_embd=width)
    GPTConfig(n_head=heads, n_embd=int(named[2]))


def help_text(capsys, monkeypatch, defaults, description=None, flag="--help") -> str:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as ended:
        parse(defaults, [flag], description)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_groups_and_the_recipe_s_defaults_and_keeps_a_percent_sign(capsys, monkeypatch):
    text = help_text(capsys, monkeypatch, together(Toy(size=42), Box()), "Wins 50% of games.")
    assert "Wins 50% of games." in text
    assert "how large it is, 100% of the time (default: 42)" in text
    assert text.index("toys:") < text.index("--size") < text.index("boxes:") < text.index("--lid")
    assert "--config" in text
    assert "{red,blue}" in text
    assert "--name WORD " in text
    assert "--maker MAKER " in text
    assert "None" not in text
    assert "--secret" not in text
    assert text.index("boxes:") < text.index("--stuffed"), "a flag in the group of another config"
    assert "--no_soft" in text, "of a switch that is on, how to turn it off"
    assert "--soft" not in text
    assert "--secret" in help_text(capsys, monkeypatch, together(Toy()), flag="--help_all")


def test_the_words_of_a_kernel_are_no_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel.py", "-f", "kernel.json"])
    with pytest.raises(UserError):
        parse(together(Toy()))
    kernel = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)
    assert parse(together(Toy())).part0 == Toy()


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["soft", "loud", "stuffed"])  # by default True, False and None
def test_a_switch_shows_the_flag_that_changes_what_the_recipe_sets(
    capsys, monkeypatch, name: str, value: bool
):
    recipe = together(Toy(**{name: value}))
    flag = f"--no_{name}" if value else f"--{name}"
    text = help_text(capsys, monkeypatch, recipe)
    assert re.findall(rf"--(?:no_)?{name}\b", text) == [flag]
    described = [flag.shown_name for flag in FlagParser(configs_of(recipe)).flags]
    assert flag in described
    assert getattr(parse(recipe, [flag]).part0, name) is not value


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_help_shows_at_most_forty_flags(capsys, monkeypatch, recipe):
    """A person reads no more. A new flag among them moves another one to --help_all."""
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    text = help_text(capsys, monkeypatch, defaults)
    shown = re.findall(r"^  --\w+", text, re.MULTILINE)
    assert 25 <= len(shown) <= 40


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_help_of_a_recipe_names_every_setting_once(capsys, monkeypatch, recipe):
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    text = help_text(capsys, monkeypatch, defaults, flag="--help_all")
    configs = [*configs_of(defaults).values()]
    names = [field.name for config in configs for field in dataclasses.fields(config)]
    assert len(names) == len(set(names))
    for name in names:
        assert len(re.findall(rf"^  --(no_)?{name}\b", text, re.MULTILINE)) == 1, name
    for config in configs:
        assert f"{config.group}:" in text


def printed_config(capsys, defaults, *argv: str) -> str:
    """What --print_config prints."""
    with pytest.raises(SystemExit) as ended:
        parse(defaults, [*argv, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_a_config_is_printed_once_by_all_ranks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert printed_config(capsys, together(Toy())) == ""


def values_of(settings) -> dict[str, object]:
    return {name: entry["value"] for name, entry in resolved(settings).items()}


SET_FLAGS = {
    "gpt.py": ["--n_layer", "2", "--max_length", "64", "--mixture", "0.7", "0.3"],
    "finetune.py": ["--no_packing", "--lora_r", "16", "--max_length", "auto"],
    "preference.py": ["--packing", "auto", "--loss_type", "kto", "--freeze", r"h\.[0-3]|: #"],
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_printed_config_gives_the_same_settings(capsys, tmp_path, recipe):
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    first = tmp_path / "first.yaml"
    first.write_text("learning_rate: 1e-7\neval_steps: 7\n")
    flags = [
        *("--config", str(first), "--eval_steps", "8", "--output_dir", "a 'b' # c"),
        *("--dataset", "a.txt", "x: [y]", "--sample_prompts", "null", *SET_FLAGS[recipe.name]),
    ]
    settings = parse(defaults, flags)

    printed = tmp_path / "printed.yaml"
    printed.write_text(printed_config(capsys, defaults, *flags))
    again = parse(defaults, ["--config", str(printed)])
    assert again == settings
    for part, config in configs_of(settings).items():
        # What was not set may still change with other settings.
        assert configs_of(again)[part].origins.keys() == config.origins.keys()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_printed_config_has_every_setting_with_its_help(capsys, tmp_path, recipe):
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    text = printed_config(capsys, defaults)
    assert max(map(len, text.splitlines())) <= 100
    assert sorted(re.findall(r"^#(\w+):", text, re.MULTILINE)) == sorted(values_of(defaults))
    assert "# random seed of the initial weights, the data order and dropout\n#seed: 0\n" in text
    assert "\n# --- batch and memory\n" in text

    everything = tmp_path / "everything.yaml"
    everything.write_text(re.sub(r"^#(?=\w+:)", "", text, flags=re.MULTILINE))
    assert values_of(parse(defaults, ["--config", str(everything)])) == values_of(defaults)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_no_setting_of_a_recipe_is_required(recipe):
    defaults = runpy.run_path(str(recipe))["DEFAULTS"]
    assert parse(defaults, []) == defaults


@pytest.mark.parametrize("columns", ["", "abc", "5", "10000"])
def test_an_odd_terminal_width_does_not_stop_a_run(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert toy("--size", "4").size == 4


def test_two_configs_do_not_share_a_default_list():
    Toy().parts.append("wing")
    assert Toy().parts == ["head", "tail"]


@pytest.mark.parametrize("argv", [[], ["--size", "4"]])
def test_what_a_run_does_to_its_list_does_not_reach_the_recipe(argv):
    default = Toy()
    parsed(default, argv=argv)[0].parts.append("wing")
    assert default.parts == ["head", "tail"]
    assert parsed(default, argv=argv)[0].parts == ["head", "tail"]


def test_parsing_leaves_the_recipe_s_defaults_alone():
    default = Toy(size=4)
    assert parsed(default, argv=["--size", "5"])[0].size == 5
    assert (default.size, resolved(together(default))["size"]["from"]) == (4, "recipe")
    assert parsed(default, argv=[])[0].size == 4


def test_a_flag_without_help_is_listed(capsys, monkeypatch) -> None:
    @dataclass
    class Own(Config):
        group: ClassVar[str] = "own"

        plain: str | None = flag(None, "")
        counted: int = flag(3, "")

    @dataclass
    class Defaults:
        own: Own

    text = help_text(capsys, monkeypatch, Defaults(own=Own()))
    assert "\n  --plain PLAIN" in text
    assert "(default: 3)" in text


def test_a_setting_that_is_written_in_two_spellings_is_set_twice(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_steps: 3\nmax-steps: 4\n")
    with pytest.raises(UserError, match="'max_steps' is set twice"):
        parse(gpt.DEFAULTS, ["--config", str(tmp_path / "a.yaml")])
