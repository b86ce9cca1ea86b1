"""Started by test_fuzz.py: try one bad input after the other in a single process.

`fuzz.py FOLDER SEED COUNT` writes FOLDER/attempts.jsonl, with the command and the outcome of each
attempt. If an attempt hangs, the process ends with a traceback.
"""

import faulthandler
import io
import json
import random
import runpy
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain import cli
from llmtrain.errors import UserError
from tests.launching import ROOT, TINY

HANG_SECONDS = 60

Main = Callable[[list[str]], Any]
GPT: Main = runpy.run_path(str(ROOT / "recipes" / "gpt.py"))["main"]
FINETUNE: Main = runpy.run_path(str(ROOT / "recipes" / "finetune.py"))["main"]

# Values that are hard for most flags. None of them stands for a large file.
NASTY_VALUES = shlex.split(
    "'' ' ' 0 -1 1e400 nan inf -inf None true [] {} 1,2 é 'a b' %s%n '$(reboot)' -- - "
    "/dev/null /proc/self/mem"
)
NASTY_VALUES += ["\x07", "9" * 30, "1" * 5000, "\N{PILE OF POO}"]

# All flags but --max_steps, which is no mistake if it is large, and --output_dir, which could name
# a folder of somebody else.
GPT_FLAGS = shlex.split("""
    n_layer n_head n_embd block_size dropout gradient_checkpointing dataset mixture
    dataset_train_split dataset_test_split eval_dataset columns isolate_documents eval_fraction
    tokenizer global_batch_size per_device_train_batch_size optim learning_rate lr_scheduler_type
    warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm ddp_bucket_cap_mb ddp_timeout
    run_name seed logging_steps eval_steps save_steps save_total_limit max_hours
    skip_nonfinite resume_from_checkpoint bitwise torch_compile xray_steps log_rows
    sample_prompts sync_each_batch report_to config
""")
FINETUNE_FLAGS = shlex.split("""
    model_name_or_path from_config config_overrides block_size attn_implementation freeze lora_r
    lora_alpha lora_target_modules lora_dropout format chat_template overlong on_bad_row packing
    tokenizer dataset
""")

ONE_STEP = shlex.split("--max_steps 1 --warmup_steps 0")
FINETUNE_STEP = shlex.split(
    "--tokenizer byte --block_size 32 --max_steps 1 --eval_fraction 0.1 --report_to none "
    "--global_batch_size 4"
)
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
}
OVERRIDES = ",".join(f"{name}={value}" for name, value in LLAMA.items())
NEW_LLAMA = ["--from_config", "llama", "--config_overrides", OVERRIDES]


class Attempt(NamedTuple):
    """A command, and the function that runs it."""

    main: Main
    argv: list[str]


class Fuzz:
    """Makes bad inputs of all kinds, by a seed.

    Attributes:
        number: of the current attempt. It keeps its files apart from those of other attempts.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.number = 0
        self.good_text = folder / "good.txt"
        self.good_text.write_text("the kernel waits for the bucket of the model\n" * 60)

    def attempt(self) -> tuple[str, Attempt]:
        """Return the kind of the next attempt, and the attempt."""
        kinds = {
            self.bad_value: 2,
            self.bad_words: 1,
            self.bad_yaml: 2,
            self.bad_data: 3,
            self.bad_tokenizer: 1,
            self.bad_model: 2,
            self.bad_checkpoint: 2,
            self.bad_command: 1,
        }
        [make_attempt] = self.random.choices([*kinds], weights=[*kinds.values()])
        return make_attempt.__name__, make_attempt()

    def output_dir(self) -> list[str]:
        return ["--output_dir", str(self.folder / "runs" / str(self.number))]

    def good_argv(self, main: Main) -> list[str]:
        """Return flags with which a recipe makes one step."""
        data = ["--dataset", str(self.good_text), *self.output_dir()]
        if main is FINETUNE:
            return [*NEW_LLAMA, *FINETUNE_STEP, *data]
        return [*TINY, *ONE_STEP, *data]

    def flag_of(self, main: Main) -> str:
        return self.pick(*FINETUNE_FLAGS if main is FINETUNE else GPT_FLAGS)

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def nasty_value(self) -> str:
        return self.pick(*NASTY_VALUES)

    # --- command lines and files of settings

    def bad_value(self) -> Attempt:
        """Pass a value that the flag does not take."""
        main = self.pick(GPT, GPT, FINETUNE)
        flag = self.flag_of(main)
        return Attempt(main, [*self.good_argv(main), f"--{flag}", self.nasty_value()])

    def bad_words(self) -> Attempt:
        """Pass abbreviations, words that are no flags, or flags without a value."""
        main = self.pick(GPT, FINETUNE)
        flag = self.flag_of(main)
        words = self.pick(
            [f"--{flag[:-1]}", "1"], [flag, "1"], [f"--{flag}"], [f"-{flag}"], [f"--{flag}="]
        )
        if self.random.random() < 0.5:
            words = [*words, self.nasty_value()]
        return Attempt(main, [*self.good_argv(main), *words])

    def bad_yaml(self) -> Attempt:
        flag = self.flag_of(GPT)
        call = "!!python/object/apply:os.system ['true']"
        value = self.pick(*NASTY_VALUES, "[1, 2]", "{a: 1}", call, "&a [*a]", "|")
        content = self.pick(
            f"{flag}: {value}\n",
            f"{flag}: {value}\n{flag}: 1\n",
            f"- {flag}\n",
            f"{flag}:\n  - {{\n",
            f"\t{flag}: 1\n",
            f"{flag[:-1]}: 1\n",
            "",
            "a: &a [*b]\n",
            "1: 2\n",
            "null: null\n",
            self.random.randbytes(50),
        )
        path = self.folder / f"{self.number}.yaml"
        write(path, content)

        absent = self.folder / "absent.yaml"
        config = self.pick(path, path, path, self.folder, absent)
        return Attempt(GPT, [*self.good_argv(GPT), "--config", str(config)])

    # --- data and tokenizers

    def bad_data(self) -> Attempt:
        main = self.pick(GPT, FINETUNE)
        suffixes = shlex.split(".txt .md .jsonl .jsonl .jsonl .parquet .csv .bin ''")
        suffix = self.pick(*suffixes)
        path = self.folder / f"data-{self.number}{suffix}"
        chance = self.random.random()
        if chance < 0.1:
            path.mkdir()
        elif chance < 0.9:
            write(path, self.bad_content())
        return Attempt(main, [*self.good_argv(main), "--dataset", str(path)])

    def bad_content(self) -> bytes:
        bad_line = json.dumps(self.bad_record()).encode()
        good_line = (
            b'{"text": "the kernel waits", "messages": [{"role": "user", "content": "a"}]}\n'
        )
        good_text = self.good_text.read_bytes()
        return self.pick(
            b"",
            b"\n",
            b"\xff\xfe\x00",
            b"text\n",
            self.random.randbytes(200),
            good_text[:100] + self.random.randbytes(5) + good_text[100:],
            bad_line,
            bad_line[: len(bad_line) // 2],
            good_line * 3 + bad_line + b"\n" + good_line,
            good_line * 3 + b"{",
            b'text,label\n"a\n',
            b"PAR1" + self.random.randbytes(30) + b"PAR1",
            b"[" * 100_000,
        )

    def bad_record(self) -> Any:
        text = self.pick(None, 3, [], {}, "", "\ud800", "\x00", "a" * 100_000)
        messages = self.pick(None, 3, [], {}, [[]], [{}], [{"role": "user"}], "hello")
        answer = {"role": "assistant", "content": "a"}
        return self.pick(
            {"text": text},
            {"messages": messages},
            {"messages": [answer, answer | {"content": None}]},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"prompt": "a"},
            {"prompt": 3, "completion": 4},
            {"conversations": [{"from": "human", "value": 3}]},
            {"instruction": "a", "output": None},
            {"": ""},
            {},
            [],
            None,
            3,
        )

    def bad_tokenizer(self) -> Attempt:
        folder = self.folder / f"tokenizer-{self.number}"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if self.random.random() < 0.7:
                content = self.pick("", "{}", "[]", '{"model": {}}', '{"version": "1.0"}', b"\xff")
                write(folder / name, content)

        bad_names = shlex.split(
            "bpe bpe: bpe:0 bpe:-3 bpe:x bpe:1000000000000 bpe:1e3 char:3 words"
        )
        tokenizer = self.pick(str(folder), str(folder), *bad_names)
        main = self.pick(GPT, FINETUNE)
        return Attempt(main, [*self.good_argv(main), "--tokenizer", tokenizer])

    # --- models and runs

    def bad_model(self) -> Attempt:
        """Fine-tune a model folder of which one file is damaged."""
        folder = self.folder / f"model-{self.number}"
        config = AutoConfig.for_model("llama", vocab_size=300, **LLAMA)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        self.damage_model(folder)

        data = ["--dataset", str(self.good_text), *self.output_dir()]
        more_flags = self.pick([], ["--lora_r", "2"], ["--tokenizer", str(folder)])
        model = ["--model_name_or_path", str(folder)]
        return Attempt(FINETUNE, [*FINETUNE_STEP, *data, *model, *more_flags])

    def damage_model(self, folder: Path) -> None:
        config_file = folder / "config.json"
        weights = folder / "model.safetensors"
        match self.random.randrange(8):
            case 0 | 1 | 2:
                self.damage(self.pick(config_file, weights))
            case 3:
                config = json.loads(config_file.read_text())
                key = self.pick(*config)
                config[key] = self.pick(None, -1, "x", [], {}, 10**9)
                config_file.write_text(json.dumps(config))
            case 4:
                torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
                weights.unlink()
            case 5:
                content = bytearray(weights.read_bytes())
                content[self.random.randrange(8)] ^= 255  # in the length of the header
                weights.write_bytes(bytes(content))
            case 6:
                content = self.pick("{}", "[]", "", '{"peft_type": "LORA"}')
                (folder / "adapter_config.json").write_text(content)
            case 7:
                content = self.pick("{}", '{"weight_map": 3}', "x")
                (folder / "model.safetensors.index.json").write_text(content)
                weights.unlink()

    def damage(self, path: Path) -> None:
        content = path.read_bytes()
        match self.random.randrange(4):
            case 0:
                path.unlink()
            case 1:
                path.write_bytes(content[: self.random.randrange(1 + len(content))])
            case 2:
                contents = ["", "{}", "[]", "{", "null", b"\xff" * 20, '{"model_type": "nothing"}']
                write(path, self.pick(*contents))
            case 3:
                path.write_bytes(content + b"x")

    def damaged_run(self) -> Path:
        """Return a copy of a finished run, of which one file is damaged."""
        finished = self.folder / "finished"
        if not finished.exists():
            GPT([*self.saving_argv(), "--output_dir", str(finished)])
            reset_accelerate()

        copy = self.folder / f"copy-{self.number}"
        shutil.copytree(finished, copy)
        self.damage(self.pick(*sorted(path for path in copy.rglob("*") if path.is_file())))
        return copy

    def saving_argv(self) -> list[str]:
        return [*self.good_argv(GPT), "--save_steps", "1"]

    def bad_checkpoint(self) -> Attempt:
        """Resume from a damaged checkpoint, or continue a damaged run."""
        copy = self.damaged_run()
        if self.random.random() < 0.5:
            argv = ["--max_steps", "2", "--output_dir", str(copy)]
        else:
            source = self.pick(copy, copy / "checkpoints" / "step-00000001")
            argv = ["--resume_from_checkpoint", str(source)]
        return Attempt(GPT, [*self.saving_argv(), *argv])

    def bad_command(self) -> Attempt:
        """Let a command of `llmtrain` look at a damaged run, or at something else."""
        copy = str(self.damaged_run())
        absent = str(self.folder / "absent")
        text = str(self.good_text)
        nasty = self.nasty_value()
        folder = self.pick(copy, copy, copy, absent, text, nasty)
        commands = [
            [],
            [nasty],
            ["diff", copy, folder],
            ["diff", folder, copy],
            ["export", folder],
            ["generate", copy, "--max_new_tokens", nasty],
            ["generate", folder, "--max_new_tokens", "3"],
            ["init", text],
            ["learn", nasty],
            ["plan", text],
            ["rows", folder],
            ["rows", folder, "--step", nasty],
            ["report", folder, "--json"],
            ["report", folder, "--output", str(self.folder / "report.html")],
            ["runs", "check", folder],
            ["runs", folder],
            ["verify", "layout", absent],
            ["verify", nasty, folder],
            ["xray", absent],
        ]
        return Attempt(cli.main, self.pick(*commands))


def write(path: Path, content: str | bytes) -> None:
    if isinstance(content, str):
        content = content.encode(errors="replace")
    path.write_bytes(content)


# --- attempts


def reset_accelerate() -> None:
    """Let the next run begin as the first one of its process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def outcome_of(attempt: Attempt) -> tuple[str, str]:
    """Return how an attempt ended, and its message.

    It ends in "success", "one line", "many lines" or "traceback".
    """
    out = io.StringIO()
    err = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            attempt.main(attempt.argv)
    except UserError as error:
        lines = str(error).splitlines()
    except SystemExit as end:
        if "Traceback (most recent call last)" in err.getvalue():
            return "traceback", err.getvalue()[-1500:]
        if end.code in (0, 1, None):
            return "success", ""
        lines = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    except BaseException:
        return "traceback", traceback.format_exc()[-1500:]
    else:
        return "success", ""
    kind = "one line" if len(lines) == 1 else "many lines"
    return kind, "\n".join(lines) or err.getvalue()[-300:]


def main() -> None:
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2])
    count = int(sys.argv[3])

    fuzz = Fuzz(folder, seed)
    with (folder / "attempts.jsonl").open("w") as attempts:
        for number in range(count):
            fuzz.number = number
            kind, attempt = fuzz.attempt()

            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            outcome, message = outcome_of(attempt)
            faulthandler.cancel_dump_traceback_later()
            reset_accelerate()

            entry = {
                "kind": kind,
                "argv": [word[:200] for word in attempt.argv],
                "outcome": outcome,
                "message": message,
                "temporary_files": [*map(str, folder.rglob(".tmp-*"))],
            }
            attempts.write(json.dumps(entry) + "\n")
            attempts.flush()


if __name__ == "__main__":
    main()
