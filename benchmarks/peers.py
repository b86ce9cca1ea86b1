"""Loops of other packages, each as its authors run it, in a process of its own: prints its figure as JSON.

What only some of them need is imported inside: the seconds from a command to its first update are measured, too.

python -m benchmarks.peers nanogpt | loss FOLDER ...       FOLDER: a checkout of github.com/karpathy/nanoGPT
python -m benchmarks.peers ddp | trainer | sft | dpo | map ...
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.nanogpt_loop import NanoGPTLoop

BETWEEN_READINGS = 10  # updates


class Readings:
    """Tokens per second between readings, ten updates each."""

    def __init__(self, tokens_per_update: int) -> None:
        self.tokens = tokens_per_update * BETWEEN_READINGS
        self.speeds: list[float] = []
        self.began = time.perf_counter()

    def updated(self, number: int, loss: torch.Tensor) -> None:
        if number % BETWEEN_READINGS == 0:
            loss.item()
            now = time.perf_counter()
            self.speeds.append(self.tokens / (now - self.began))
            self.began = now

    @property
    def median(self) -> float:
        """The median without the first, which pays for what is done once."""
        return statistics.median(self.speeds[1:])


def say_figure(value: float) -> None:
    print(json.dumps(value), flush=True)


def bare_update(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> torch.Tensor:
    """Make an update with our model on rows of tokens [batch, block + 1]; returns their mean loss."""
    loss: torch.Tensor = network(ids, ids) / ids[:, 1:].numel()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def nanogpt(arguments: argparse.Namespace) -> None:
    """Run nanoGPT's loop, and print its tokens per second."""
    loop = NanoGPTLoop(
        folder=arguments.folder,
        tokens=arguments.tokens,
        shape=arguments.shape,
        vocabulary=arguments.vocabulary,
        device=arguments.device,
        dtype=torch.bfloat16 if arguments.bf16 else None,
        fused=arguments.fused,
        backend="inductor" if arguments.compile else None,
    )
    readings = Readings(loop.positions)
    for number in range(1, arguments.steps + 1):
        readings.updated(number, loop.step())
    say_figure(readings.median)


def nanogpts_loss(arguments: argparse.Namespace) -> None:
    """Print the nats per token of one of its checkpoints, over a file of tokens in rows of its block size."""
    sys.path.insert(0, arguments.folder)
    import model as nano

    saved = torch.load(arguments.checkpoint, weights_only=True)
    network = nano.GPT(nano.GPTConfig(**saved["model_args"]))
    network.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(arguments.tokens, np.uint16).astype(np.int64))
    block, total = network.config.block_size, 0.0
    count = (len(ids) - 1) // block * block
    rows, targets = ids[:count].view(-1, block), ids[1 : count + 1].view(-1, block)
    with torch.no_grad():
        for x, y in zip(rows.split(128), targets.split(128), strict=True):
            total += network(x, y)[1].item() * y.numel()
    say_figure(total / count)


def ddp(arguments: argparse.Namespace) -> None:
    """Run a hand-written loop around PyTorch's own DDP, with our model and optimizer; alone where none launched it."""
    from accelerate import Accelerator

    from llmtrain import GPTConfig, OptimConfig, build_gpt, make_optimizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    layers, heads, width, block, batch = arguments.shape
    shape = GPTConfig(
        n_layer=layers, n_head=heads, n_embd=width, block_size=block, architecture="lfm2"
    )
    network: torch.nn.Module = build_gpt(shape, arguments.vocabulary)  # the recipe's own
    if world > 1:
        torch.distributed.init_process_group("gloo")
    optimizer = make_optimizer(
        Accelerator(cpu=True), network, OptimConfig(optim="muon")
    )  # as the recipe's is
    if world > 1:
        network = torch.nn.parallel.DistributedDataParallel(network)
    readings = Readings(batch * block * world)
    for number in range(1, arguments.steps + 1):
        ids = torch.randint(arguments.vocabulary, (batch, block + 1))
        readings.updated(number, bare_update(network, optimizer, ids))
    if int(os.environ.get("RANK", "0")) == 0:
        say_figure(readings.median)
    sys.stdout.flush()
    if world > 1:
        torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that is done


def trainer(arguments: argparse.Namespace) -> None:
    """Run transformers' Trainer on rows that are ready; print its tokens per second.

    With --first_step print the time at which the first update was made.
    """
    import datasets
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        DataCollatorForLanguageModeling,
        PreTrainedTokenizerFast,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    rows = datasets.Dataset.load_from_disk(str(arguments.rows))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    readings = Readings(arguments.batch * (len(rows[0]["input_ids"]) - 1))

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if arguments.first_step:
                say_figure(time.time())
                os._exit(0)
            readings.updated(state.global_step, torch.zeros(()))

    flags = json.loads(arguments.flags)
    settings = TrainingArguments(
        output_dir=str(arguments.rows.parent / "trainer"),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.steps,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **flags,
    )
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(
        model, settings, data_collator=collator, train_dataset=rows, callbacks=[Watch()]
    ).train()
    say_figure(readings.median)


def real_tokens_per_second(trainer: Any, arguments: argparse.Namespace, **settings: Any) -> None:
    """Run a trainer of TRL's on the lines of a file; print its real tokens per second, padding not counted."""
    import datasets
    from transformers import AutoTokenizer, TrainerCallback

    seen: list[tuple[float, int]] = []  # when, and the tokens until then

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((time.perf_counter(), Counting.tokens))

    class Counting(trainer):  # type: ignore[misc]
        tokens = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            Counting.tokens += int(mask.sum() if mask is not None else inputs["input_ids"].numel())
            return super().compute_loss(model, inputs, *args, **kwargs)

    lines = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    loop = Counting(
        model=str(arguments.model),
        train_dataset=datasets.Dataset.from_list(lines),
        processing_class=tokenizer,
        callbacks=[Watch()],
        **settings,
    )
    loop.train()
    (began, before), (ended, after) = seen[len(seen) // 5], seen[-1]
    say_figure((after - before) / (ended - began))


def flags_of_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the training arguments that all trainers of TRL are given."""
    return {
        "output_dir": str(arguments.rows.parent / "trl"),
        "per_device_train_batch_size": arguments.batch,
        "max_steps": arguments.steps,
        "max_length": arguments.length,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": arguments.device == "cpu",
        "disable_tqdm": True,
        **json.loads(arguments.flags),
    }


def sft(arguments: argparse.Namespace) -> None:
    """Run TRL's SFTTrainer on conversations."""
    from trl import SFTConfig, SFTTrainer

    adapters = None
    if arguments.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=arguments.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = SFTConfig(**flags_of_trl(arguments))
    real_tokens_per_second(SFTTrainer, arguments, args=settings, peft_config=adapters)


def sft_preparation(arguments: argparse.Namespace) -> None:
    """Print the seconds in which TRL's SFTTrainer makes packed rows of conversations, with masks."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(shape)
    settings = SFTConfig(
        output_dir=str(arguments.cache / "trl"),
        assistant_only_loss=True,
        packing=True,
        max_length=arguments.length,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    began = time.perf_counter()
    data = datasets.load_dataset(
        "json", data_files=str(arguments.rows), split="train", cache_dir=str(arguments.cache)
    )
    trainer = SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    seconds = time.perf_counter() - began
    rows = trainer.train_dataset
    print(len(rows), "rows with", rows.column_names)
    say_figure(seconds)


def dpo(arguments: argparse.Namespace) -> None:
    """Run TRL's DPOTrainer on pairs."""
    from trl import DPOConfig, DPOTrainer

    real_tokens_per_second(DPOTrainer, arguments, args=DPOConfig(**flags_of_trl(arguments)))


def tokenise(arguments: argparse.Namespace) -> None:
    """Print the seconds of datasets.map over two processes as in run_clm.py: tokens, then rows of one length."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    length = arguments.length

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"])["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        stream = [token for ids in batch["input_ids"] for token in ids]
        return {
            "input_ids": [
                stream[i : i + length] for i in range(0, len(stream) - length + 1, length)
            ]
        }

    began = time.perf_counter()
    data = datasets.load_dataset(
        "json", data_files=str(arguments.rows), split="train", cache_dir=str(arguments.cache)
    )
    data = data.map(encode, batched=True, num_proc=2, remove_columns=data.column_names)
    data.map(group, batched=True, num_proc=2)
    say_figure(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peers = parser.add_subparsers(required=True)
    loop = argparse.ArgumentParser(add_help=False)
    loop.add_argument("--vocabulary", type=int, required=True)
    loop.add_argument(
        "--shape", type=int, nargs=5, metavar=("LAYERS", "HEADS", "WIDTH", "BLOCK", "BATCH")
    )
    loop.add_argument("--steps", type=int, required=True)
    one = peers.add_parser("nanogpt", parents=[loop])
    one.add_argument("folder", type=str)
    one.add_argument("--tokens", type=Path, required=True, help="uint16, one after the other")
    for flag in ("--compile", "--fused", "--bf16"):
        one.add_argument(flag, action="store_true")
    one.add_argument("--device", default="cpu")
    one.set_defaults(run=nanogpt)
    saved = peers.add_parser("loss")
    saved.add_argument("folder", type=str)
    saved.add_argument("checkpoint", type=Path)
    saved.add_argument("tokens", type=Path)
    saved.set_defaults(run=nanogpts_loss)
    peers.add_parser("ddp", parents=[loop]).set_defaults(run=ddp)
    on_rows = {
        "trainer": trainer,
        "sft": sft,
        "dpo": dpo,
        "map": tokenise,
        "sft-preparation": sft_preparation,
    }
    for name, function in on_rows.items():
        other = peers.add_parser(name)
        other.add_argument("model", type=Path)
        other.add_argument("rows", type=Path)
        other.add_argument("--batch", type=int)
        other.add_argument("--length", type=int)
        other.add_argument("--steps", type=int)
        other.add_argument("--flags", default="{}", help="of its training arguments, as JSON")
        other.add_argument("--first_step", action="store_true")
        other.add_argument("--cache", type=Path)
        other.add_argument("--device", default="cpu")
        other.add_argument("--lora", type=int, default=0, help="rank of adapters")
        other.set_defaults(run=function)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
