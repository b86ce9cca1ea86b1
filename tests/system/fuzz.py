"""Run by test_fuzz.py: bad input after bad input, in one process; says how each ended.

python fuzz.py FOLDER SEED COUNT writes FOLDER/found.jsonl, a line for each: what was tried, and how it ended.
"""

import faulthandler
import io
import json
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain import cli
from llmtrain.errors import UserError
from tests.launching import ROOT, TINY

_HANG_SECONDS = 60
GPT, FINETUNE = (
    runpy.run_path(str(ROOT / "recipes" / name))["main"] for name in ("gpt.py", "finetune.py")
)
NASTY = [  # nothing that stands for much of a disk
    "",
    " ",
    "0",
    "-1",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "None",
    "true",
    "[]",
    "{}",
    "1,2",
    "é",
    "a b",
    "\x07",
]
NASTY += [
    "9" * 30,
    "1" * 5000,
    "%s%n",
    "$(reboot)",
    "--",
    "-",
    "/dev/null",
    "/proc/self/mem",
    "\N{PILE OF POO}",
]
FLAGS = {
    GPT: """
        n_layer n_head n_embd block_size dropout gradient_checkpointing dataset mixture text_field
        dataset_train_split dataset_test_split eval_dataset columns isolate_documents
        eval_fraction tokenizer global_batch_size per_device_train_batch_size optim learning_rate lr_scheduler_type
        warmup_steps weight_decay adam_beta1 adam_beta2 max_grad_norm ddp_bucket_cap_mb ddp_timeout ddp_comm_hook
        run_name seed logging_steps eval_steps save_steps save_total_limit max_hours
        skip_nonfinite resume_from_checkpoint bitwise torch_compile xray_steps log_rows replay_step
        sample_prompts sync_each_batch report_to config
    """.split(),  # noqa: SIM905
    FINETUNE: """
        model_name_or_path from_config config_overrides block_size attn_implementation freeze lora_r lora_alpha
        lora_target_modules lora_dropout format chat_template overlong on_bad_row packing tokenizer dataset
    """.split(),  # noqa: SIM905
}  # not max_steps, of which many are no mistake; nor output_dir, which might be anybody's
SMALL_FINETUNE = [
    "--from_config",
    "llama",
    "--tokenizer",
    "byte",
    "--block_size",
    "32",
    "--max_steps",
    "1",
]
SMALL_FINETUNE += [
    "--config_overrides",
    "hidden_size=32,num_hidden_layers=1,intermediate_size=32,num_attention_heads=2",
]
SMALL_FINETUNE += ["--eval_fraction", "0.1", "--report_to", "none", "--global_batch_size", "4"]
Try = tuple[Callable[[list[str]], Any], list[str]]


class Fuzz:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.good = folder / "good.txt"
        self.good.write_text("the kernel waits for the bucket of the model\n" * 60)
        self.runs, self.number = folder / "runs", 0
        self.kinds = [
            self.flag,
            self.flag,
            self.words,
            self.yaml,
            self.yaml,
            self.data,
            self.data,
            self.data,
        ]
        self.kinds += [
            self.tokenizer,
            self.model,
            self.model,
            self.checkpoint,
            self.checkpoint,
            self.command,
        ]

    def base(self, main: Any) -> list[str]:
        if main is FINETUNE:
            return [*SMALL_FINETUNE, "--dataset", str(self.good)]
        return [*TINY, "--max_steps", "1", "--warmup_steps", "0", "--dataset", str(self.good)]

    def flag(self) -> Try:
        """One flag with a value that is none."""
        main = self.draw.choice([GPT, GPT, FINETUNE])
        name = self.draw.choice(FLAGS[main])
        return main, [*self.base(main), f"--{name}", self.draw.choice(NASTY)]

    def words(self) -> Try:
        """Words that are no flags, abbreviations, flags without their value or twice."""
        main = self.draw.choice([GPT, FINETUNE])
        name = self.draw.choice(FLAGS[main])
        words = self.draw.choice(
            [[f"--{name[:-1]}", "1"], [name, "1"], [f"--{name}"], [f"-{name}"], [f"--{name}="]]
        )
        return main, [*self.base(main), *words, *self.draw.sample(NASTY, self.draw.randrange(2))]

    def yaml(self) -> Try:
        path = self.folder / f"{self.number}.yaml"
        name = self.draw.choice(FLAGS[GPT])
        value = self.draw.choice(
            [*NASTY, "[1, 2]", "{a: 1}", "!!python/object/apply:os.system ['true']", "&a [*a]", "|"]
        )
        content = self.draw.choice(
            [
                f"{name}: {value}\n".encode(errors="replace"),
                f"{name}: {value}\n{name}: 1\n".encode(errors="replace"),
                f"- {name}\n".encode(),
                f"{name}:\n  - {{\n".encode(),
                f"\t{name}: 1\n".encode(),
                f"{name[:-1]}: 1\n".encode(),
                self.draw.randbytes(50),
                b"",
                b"a: &a [*b]\n",
                b"1: 2\n",
                b"null: null\n",
            ]
        )
        path.write_bytes(content)
        where = self.draw.choice([path, path, path, self.folder, self.folder / "absent.yaml"])
        return GPT, [*self.base(GPT), "--config", str(where)]

    def data(self) -> Try:
        main = self.draw.choice([GPT, FINETUNE])
        suffix = self.draw.choice(
            [".txt", ".md", ".jsonl", ".jsonl", ".jsonl", ".parquet", ".csv", ".bin", ""]
        )
        path = self.folder / f"data-{self.number}{suffix}"
        record = self.draw.choice(
            [
                {"text": self.draw.choice([None, 3, [], {}, "", "\ud800", "\x00", "a" * 100_000])},
                {
                    "messages": self.draw.choice(
                        [None, 3, [], {}, [[]], [{}], [{"role": "user"}], "hello"]
                    )
                },
                {
                    "messages": [
                        {"role": r, "content": c}
                        for r, c in (("assistant", "a"), ("assistant", None))
                    ]
                },
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
            ]
        )
        line = json.dumps(record).encode()
        fine = b'{"text": "the kernel waits", "messages": [{"role": "user", "content": "a"}]}\n'
        good = self.good.read_bytes()
        content = self.draw.choice(
            [
                b"",
                b"\n",
                b"\xff\xfe\x00",
                self.draw.randbytes(200),
                good[:100] + self.draw.randbytes(5) + good[100:],
                line,
                fine * 3 + line + b"\n" + fine,
                line[: len(line) // 2],
                fine * 3 + b"{",
                b"text\n",
                b'text,label\n"a\n',
                b"PAR1" + self.draw.randbytes(30) + b"PAR1",
                b"[" * 100_000,
            ]
        )
        if self.draw.random() < 0.1:
            path.mkdir()
        elif self.draw.random() < 0.9:
            path.write_bytes(content)
        return main, [*self.base(main), "--dataset", str(path)]

    def tokenizer(self) -> Try:
        folder = self.folder / f"tokenizer-{self.number}"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if self.draw.random() < 0.7:
                content = self.draw.choice(
                    [b"", b"{}", b"[]", b'{"model": {}}', b'{"version": "1.0"}', b"\xff"]
                )
                (folder / name).write_bytes(content)
        spec = self.draw.choice(
            [
                str(folder),
                str(folder),
                "bpe",
                "bpe:",
                "bpe:0",
                "bpe:-3",
                "bpe:x",
                f"bpe:{10**12}",
                "bpe:1e3",
                "char:3",
                "words",
            ]
        )
        main = self.draw.choice([GPT, FINETUNE])
        return main, [*self.base(main), "--tokenizer", spec]

    def model(self) -> Try:
        folder = self.folder / f"model-{self.number}"
        size = {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "intermediate_size": 32,
            "num_attention_heads": 2,
        }
        config = AutoConfig.for_model("llama", vocab_size=300, **size)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        config_file, weights = folder / "config.json", folder / "model.safetensors"
        raw = json.loads(config_file.read_text())
        match self.draw.randrange(8):
            case 0:
                weights.write_bytes(weights.read_bytes()[: self.draw.randrange(2000)])
            case 1:
                weights.unlink()
            case 2:
                key = self.draw.choice([*raw])
                config_file.write_text(
                    json.dumps(raw | {key: self.draw.choice([None, -1, "x", [], {}, 10**9])})
                )
            case 3:
                config_file.write_bytes(
                    self.draw.choice(
                        [b"", b"{}", b"[]", b"{", b"\xff", b'{"model_type": "nothing"}']
                    )
                )
            case 4:
                torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
                weights.unlink()
            case 5:
                whole = bytearray(weights.read_bytes())
                whole[self.draw.randrange(8)] ^= 255
                weights.write_bytes(bytes(whole))
            case 6:
                (folder / "adapter_config.json").write_text(
                    self.draw.choice(["{}", "[]", "", '{"peft_type": "LORA"}'])
                )
            case 7:
                (folder / "model.safetensors.index.json").write_text(
                    self.draw.choice(["{}", '{"weight_map": 3}', "x"])
                )
                weights.unlink()
        more = self.draw.choice([[], ["--lora_r", "2"], ["--tokenizer", str(folder)]])
        flags = [word for word in SMALL_FINETUNE if word not in ("--from_config", "llama")]
        place = flags.index("--config_overrides")
        del flags[place : place + 2]
        return FINETUNE, [
            *flags,
            "--dataset",
            str(self.good),
            "--model_name_or_path",
            str(folder),
            *more,
        ]

    def checkpoint(self) -> Try:
        """A resume from a checkpoint, or of a run, of which a part is damaged."""
        source = self.folder / "whole"
        flags = [*self.base(GPT), "--save_steps", "1"]
        if not source.exists():
            GPT([*flags, "--output_dir", str(source)])
            _forget()
        copy = self.folder / f"copy-{self.number}"
        os.system(f"cp -r '{source}' '{copy}'")
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        victim = self.draw.choice(files)
        content = victim.read_bytes()
        match self.draw.randrange(4):
            case 0:
                victim.unlink()
            case 1:
                victim.write_bytes(content[: len(content) // 2])
            case 2:
                victim.write_bytes(self.draw.choice([b"", b"{}", b"[]", b"null", b"\xff" * 20]))
            case 3:
                victim.write_bytes(content + b"x")
        if self.draw.random() < 0.5:
            return GPT, [
                *flags,
                "--resume_from_checkpoint",
                str(self.draw.choice([copy, copy / "checkpoints/step-00000001"])),
            ]
        return GPT, [*flags, "--max_steps", "2", "OUTPUT", str(copy)]

    def command(self) -> Try:
        """What looks at runs, at what is none."""
        self.checkpoint()
        copy = str(self.folder / f"copy-{self.number}")
        absent, nasty = str(self.folder / "absent"), self.draw.choice(NASTY)
        folder = self.draw.choice([copy, copy, copy, absent, str(self.good), nasty])
        commands = [
            ["runs", folder],
            ["runs", "check", folder],
            ["report", folder, "--output", str(self.folder / "r.html")],
        ]
        commands += [
            ["diff", folder, copy],
            ["diff", copy, folder],
            ["report", folder, "--json"],
            ["replay", folder],
        ]
        commands += [
            ["replay", folder, "--step", nasty],
            ["generate", folder, "--max_new_tokens", "3"],
            ["export", folder],
        ]
        commands += [
            ["generate", copy, "--max_new_tokens", nasty],
            ["plan", str(self.good)],
            ["xray", absent],
            ["learn", nasty],
        ]
        commands += [
            ["verify", "layout", absent],
            ["verify", nasty, folder],
            ["init", str(self.good)],
            [nasty],
            [],
        ]
        return cli.main, self.draw.choice(commands)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def outcome(main: Callable[[list[str]], Any], words: list[str]) -> tuple[str, str]:
    """How it ended, and what was said."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main(words)
    except UserError as error:
        text = str(error)
        return ("one line" if text and "\n" not in text else "many lines"), text
    except SystemExit as end:
        said = err.getvalue()
        if end.code in (0, 1, None):
            return "did it", ""
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        return ("one line" if len(lines) == 1 else "many lines"), said[-300:]
    except BaseException:
        return "traceback", traceback.format_exc()[-1500:]
    return "did it", ""


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fuzz = Fuzz(folder, seed)
    with (folder / "found.jsonl").open("w") as found:
        for number in range(count):
            fuzz.number = number
            kind = fuzz.draw.choice(fuzz.kinds)
            main, words = kind()
            place = str(fuzz.runs / str(number))
            if main is not cli.main:
                words = [*words, "--output_dir", place] if "OUTPUT" not in words else words
                words = ["--output_dir" if word == "OUTPUT" else word for word in words]
            faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
            began = time.monotonic()
            ended, said = outcome(main, words)
            faulthandler.cancel_dump_traceback_later()
            _forget()
            left = [str(path.relative_to(folder)) for path in folder.rglob(".tmp-*")]
            line = {
                "kind": kind.__name__,
                "words": [word[:200] for word in words],
                "ended": ended,
                "said": said,
            }
            found.write(
                json.dumps(line | {"left": left, "seconds": time.monotonic() - began}) + "\n"
            )
            found.flush()


if __name__ == "__main__":
    main()
