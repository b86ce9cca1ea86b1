"""Loops of other packages, each as its authors run it. Every peer prints its figure as JSON.

python -m benchmarks.peers PEER ...     (--help lists the peers)

The tables start each peer in a process of its own. Some measure the seconds until the first step,
so a package that not all peers need is imported by those that do.
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

from benchmarks.nanogpt import NanoGPTLoop
from benchmarks.runs import GPTShape

LOGGING_STEPS = 10


def bare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> torch.Tensor:
    """Make a step with a model of llmtrain on tokens [B, T + 1]; return their mean loss."""
    target_tokens = ids[:, 1:].numel()
    loss: torch.Tensor = model(ids, ids) / target_tokens
    loss.backward()

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    return loss


class Speedometer:
    """Measures tokens per second, every ``LOGGING_STEPS`` steps.

    Args:
        tokens_per_step: the tokens of a step, of all processes.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step * LOGGING_STEPS
        self._speeds: list[float] = []
        self._start = time.perf_counter()

    def end_step(self, step: int, loss: torch.Tensor) -> None:
        """Count a step. ``step`` starts at 1; reading its ``loss`` waits until it is computed."""
        if step % LOGGING_STEPS == 0:
            loss.item()
            now = time.perf_counter()
            self._speeds.append(self._tokens / (now - self._start))
            self._start = now

    @property
    def median(self) -> float:
        """The median speed, without the first one, which includes one-time work."""
        return statistics.median(self._speeds[1:])


def print_figure(value: float) -> None:
    print(json.dumps(value), flush=True)


# nanoGPT


def nanogpt(arguments: argparse.Namespace) -> None:
    """nanoGPT's loop: its tokens per second."""
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
    speedometer = Speedometer(loop.positions)
    for step in range(1, arguments.steps + 1):
        loss = loop.step()
        speedometer.end_step(step, loss)
    print_figure(speedometer.median)


def nanogpt_loss(arguments: argparse.Namespace) -> None:
    """A checkpoint of nanoGPT: its loss on a file of tokens, in nats per token."""
    sys.path.insert(0, arguments.folder)
    import model as nano

    checkpoint = torch.load(arguments.checkpoint, weights_only=True)
    network = nano.GPT(nano.GPTConfig(**checkpoint["model_args"]))
    network.load_state_dict(checkpoint["model"])
    block = network.config.block_size

    # Rows of a full block, each with the tokens that follow its own by one.
    ids = torch.from_numpy(np.fromfile(arguments.tokens, np.uint16).astype(np.int64))
    count = (len(ids) - 1) // block * block
    inputs = ids[:count].view(-1, block)
    targets = ids[1 : count + 1].view(-1, block)

    total = 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(128), targets.split(128), strict=True):
            _, loss = network(x, y)
            total += loss.item() * y.numel()
    print_figure(total / count)


# PyTorch


def ddp(arguments: argparse.Namespace) -> None:
    """A bare loop with the model and optimizer of recipes/gpt.py: its tokens per second.

    If torchrun starts it, PyTorch's DistributedDataParallel averages the gradients.
    """
    from accelerate import Accelerator

    from llmtrain import GPTConfig, OptimConfig, build_gpt, make_optimizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")

    shape = arguments.shape
    config = GPTConfig(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        block_size=shape.block,
        architecture="lfm2",
    )
    model: torch.nn.Module = build_gpt(config, arguments.vocabulary)
    optimizer = make_optimizer(Accelerator(cpu=True), model, OptimConfig(optim="muon"))
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)

    speedometer = Speedometer(shape.batch * shape.block * world_size)
    for step in range(1, arguments.steps + 1):
        ids = torch.randint(arguments.vocabulary, (shape.batch, shape.block + 1))
        loss = bare_step(model, optimizer, ids)
        speedometer.end_step(step, loss)

    if rank == 0:
        print_figure(speedometer.median)
    if world_size > 1:
        torch.distributed.barrier()
    os._exit(0)  # gloo's threads sometimes abort a process that is done


# transformers and datasets


def trainer(arguments: argparse.Namespace) -> None:
    """The Trainer of transformers on rows of tokens: its tokens per second.

    With --first_step, it prints the time at which the first step ends.
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
    targets_of_row = len(rows[0]["input_ids"]) - 1
    speedometer = Speedometer(arguments.batch * targets_of_row)

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if arguments.first_step:
                print_figure(time.time())
                os._exit(0)
            speedometer.end_step(state.global_step, torch.zeros(()))

    training_arguments = TrainingArguments(
        output_dir=str(arguments.rows.parent / "trainer"),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.steps,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **json.loads(arguments.flags),
    )
    config = AutoConfig.from_pretrained(arguments.model)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=training_arguments,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=rows,
        callbacks=[EndOfStep()],
    )
    trainer.train()
    print_figure(speedometer.median)


def datasets_map(arguments: argparse.Namespace) -> None:
    """``datasets.map`` on two processes, as in run_clm.py: its seconds from a file of text to rows."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    length = arguments.length

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"])["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, Any]:
        stream: list[int] = []
        for ids in batch["input_ids"]:
            stream.extend(ids)
        starts = range(0, len(stream) - length + 1, length)
        return {"input_ids": [stream[start : start + length] for start in starts]}

    start = time.perf_counter()
    data = datasets.load_dataset(
        "json",
        data_files=str(arguments.rows),
        split="train",
        cache_dir=str(arguments.cache),
    )
    data = data.map(encode, batched=True, num_proc=2, remove_columns=data.column_names)
    data.map(group, batched=True, num_proc=2)
    print_figure(time.perf_counter() - start)


# TRL


def sft(arguments: argparse.Namespace) -> None:
    """TRL's SFTTrainer on conversations: its tokens per second, without padding."""
    from trl import SFTConfig, SFTTrainer

    adapters = None
    if arguments.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=arguments.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    config = SFTConfig(**training_arguments_of_trl(arguments))
    print_speed_of_trl(SFTTrainer, arguments, args=config, peft_config=adapters)


def dpo(arguments: argparse.Namespace) -> None:
    """TRL's DPOTrainer on preference pairs: its tokens per second, without padding."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**training_arguments_of_trl(arguments))
    print_speed_of_trl(DPOTrainer, arguments, args=config)


def gkd(arguments: argparse.Namespace) -> None:
    """TRL's GKDTrainer on the answers in conversations: the same, and the loss of each step."""
    import datasets
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = []
    for line in arguments.rows.read_text().splitlines():
        chat = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_dict=False
        )
        # The line break after the answer is no target of llmtrain.
        ids = tokenizer.apply_chat_template(chat, return_dict=False)[:-1]
        mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        rows.append({"prompt": "", "input_ids": ids, "completion_mask": mask})

    config = GKDConfig(lmbda=0, beta=0, **training_arguments_of_trl(arguments))
    speed, losses = run_trl(
        GKDTrainer,
        arguments,
        datasets.Dataset.from_list(rows),
        args=config,
        teacher_model=str(arguments.teacher),
    )
    print(json.dumps({"speed": speed, "losses": losses}), flush=True)


def training_arguments_of_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the training arguments of every trainer of TRL."""
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


def print_speed_of_trl(
    trainer_class: Any, arguments: argparse.Namespace, **trainer_arguments: Any
) -> None:
    """Run a trainer of TRL on a file of JSON lines; print its tokens per second, without padding."""
    import datasets

    lines = arguments.rows.read_text().splitlines()
    rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
    speed, _ = run_trl(trainer_class, arguments, rows, **trainer_arguments)
    print_figure(speed)


def run_trl(
    trainer_class: Any, arguments: argparse.Namespace, rows: Any, **trainer_arguments: Any
) -> tuple[float, list[float]]:
    """Run a trainer of TRL; return its tokens per second, without padding, and the steps' losses."""
    from transformers import AutoTokenizer, TrainerCallback

    times: list[float] = []  # when each step ended
    token_counts: list[int] = []  # the tokens until then
    losses: list[float] = []

    class EndOfStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())
            token_counts.append(CountingTrainer.tokens)

    class CountingTrainer(trainer_class):  # type: ignore[misc]
        tokens = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if "attention_mask" in inputs:
                CountingTrainer.tokens += int(inputs["attention_mask"].sum())
            else:
                CountingTrainer.tokens += inputs["input_ids"].numel()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(loss.item())
            return loss

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = CountingTrainer(
        model=str(arguments.model),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[EndOfStep()],
        **trainer_arguments,
    )
    trainer.train()

    first = len(times) // 5  # the steps before warm up
    tokens = token_counts[-1] - token_counts[first]
    return tokens / (times[-1] - times[first]), losses


def sft_preparation(arguments: argparse.Namespace) -> None:
    """TRL's SFTTrainer: its seconds from a file of conversations to packed rows with loss masks."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tiny_llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = LlamaForCausalLM(tiny_llama)
    config = SFTConfig(
        output_dir=str(arguments.cache / "trl"),
        assistant_only_loss=True,
        packing=True,
        max_length=arguments.length,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )

    start = time.perf_counter()
    data = datasets.load_dataset(
        "json",
        data_files=str(arguments.rows),
        split="train",
        cache_dir=str(arguments.cache),
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    seconds = time.perf_counter() - start

    rows = trainer.train_dataset
    print(len(rows), "rows with", rows.column_names)
    print_figure(seconds)


# The command line


def main() -> None:
    arguments = make_parser().parse_args()
    if getattr(arguments, "shape", None):
        arguments.shape = GPTShape(*arguments.shape)
    arguments.peer(arguments)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peers = parser.add_subparsers(required=True, metavar="PEER")

    random_tokens = argparse.ArgumentParser(add_help=False)
    random_tokens.add_argument("--vocabulary", type=int, required=True)
    random_tokens.add_argument("--shape", type=int, nargs=5, metavar=GPTShape._fields)
    random_tokens.add_argument("--steps", type=int, required=True)

    nanogpt_parser = peers.add_parser("nanogpt", parents=[random_tokens], help=nanogpt.__doc__)
    nanogpt_parser.add_argument("folder", help="a checkout of github.com/karpathy/nanoGPT")
    nanogpt_parser.add_argument("--tokens", type=Path, required=True, help="a file of uint16")
    nanogpt_parser.add_argument("--compile", action="store_true")
    nanogpt_parser.add_argument("--fused", action="store_true", help="fused AdamW")
    nanogpt_parser.add_argument("--bf16", action="store_true")
    nanogpt_parser.add_argument("--device", default="cpu")
    nanogpt_parser.set_defaults(peer=nanogpt)

    loss_parser = peers.add_parser("loss", help=nanogpt_loss.__doc__)
    loss_parser.add_argument("folder", help="a checkout of github.com/karpathy/nanoGPT")
    loss_parser.add_argument("checkpoint", type=Path)
    loss_parser.add_argument("tokens", type=Path, help="a file of uint16")
    loss_parser.set_defaults(peer=nanogpt_loss)

    ddp_parser = peers.add_parser("ddp", parents=[random_tokens], help=ddp.__doc__)
    ddp_parser.set_defaults(peer=ddp)

    peers_with_data = {
        "trainer": trainer,
        "map": datasets_map,
        "sft": sft,
        "dpo": dpo,
        "gkd": gkd,
        "sft-preparation": sft_preparation,
    }
    for name, function in peers_with_data.items():
        data_parser = peers.add_parser(name, help=function.__doc__)
        data_parser.add_argument("model", type=Path, help="a folder with a tokenizer, or a model")
        data_parser.add_argument("rows", type=Path, help="a file of JSON lines, or rows of tokens")
        data_parser.add_argument("--teacher", type=Path, help="a folder with a model")
        data_parser.add_argument("--batch", type=int)
        data_parser.add_argument("--length", type=int, help="tokens of a row")
        data_parser.add_argument("--steps", type=int)
        data_parser.add_argument("--flags", default="{}", help="training arguments, as JSON")
        data_parser.add_argument("--first_step", action="store_true")
        data_parser.add_argument("--cache", type=Path)
        data_parser.add_argument("--device", default="cpu")
        data_parser.add_argument("--lora", type=int, default=0, help="rank of adapters")
        data_parser.set_defaults(peer=function)
    return parser


if __name__ == "__main__":
    main()
