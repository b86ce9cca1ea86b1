"""The loss with a long vocabulary, forward and backward: seconds, peak memory, and accuracy.

llmtrain's loss never holds all logits. It is compared with

- whole logits, as in PyTorch's cross-entropy, which are also the reference for the accuracy;
- torch.nn.functional.linear_cross_entropy, with its default options and the fastest ones;
- the loss of TRL's trainers.

Each turn is a process of its own, so that its peak memory is known.

Repeat the table with `OMP_NUM_THREADS=1 python -m benchmarks.loss`. With --autocast or
--trained it measures other cases, and does not write them.
"""

import argparse
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.comparison import Figures, Table, Turns, take_turns
from benchmarks.runs import flags, run_for_json, scratch
from llmtrain.console import say
from llmtrain.interfaces.batches import IGNORED
from llmtrain.launching.process import launch
from llmtrain.models.loss import linear_nll, summed_nll

ROUNDS = 3
ROWS = 2
POSITIONS = 1024
WIDTH = 512
VOCABULARY = 151_936
FASTEST_CHUNK = 256  # tokens at a time; the fastest that was tried for linear_cross_entropy

# Computes the summed loss from hidden states [B, T, C], the output weight [V, C], and targets [B, T].
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# The contenders


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return summed_nll(F.linear(hidden, weight), targets)


def linear_cross_entropy(chunk: int | None = None) -> Loss:
    """Return torch's loss with its default options, or with ``chunk`` tokens at a time."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):  # the operation ignores autocast
            hidden = hidden.bfloat16()
            weight = weight.bfloat16()
        return F.linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
            options=options,
        )

    return loss


def trl_loss() -> Loss:
    """Return the loss of TRL's trainers on a CPU, without their metrics.

    They compute the loss of ignored tokens, too, and mask it.
    """
    from trl.kernels import ChunkedLogProbFunction

    # Imported here because it takes time, which the backward pass would spend otherwise.
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK_SIZE

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        labels = targets.clamp(min=0).flatten()
        temperature = 1.0
        log_probabilities = ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), weight, None, labels, temperature, CHUNK_SIZE, None, 1.0, ()
        )[0]
        is_ignored = targets.flatten() == IGNORED
        return -log_probabilities.masked_fill(is_ignored, 0).sum()

    return loss


def available_losses() -> dict[str, Callable[[], Loss]]:
    """Return a function that makes each loss. The reference is the first."""
    losses: dict[str, Callable[[], Loss]] = {
        "whole logits": lambda: whole_logits,
        "llmtrain": lambda: linear_nll,
    }
    if hasattr(F, "linear_cross_entropy"):
        losses["torch"] = linear_cross_entropy
        losses["torch, fastest"] = partial(linear_cross_entropy, FASTEST_CHUNK)
    else:
        say("torch", f"skipped: {torch.__version__} has no linear_cross_entropy")
    if importlib.util.find_spec("trl"):
        losses["TRL"] = trl_loss
    else:
        say("TRL", "skipped: it is not installed")
    return losses


# One turn, in a process of its own


def print_costs(name: str, reference: Path, target_share: float, autocast: bool) -> None:
    """Print the costs of a loss, and how far its results are from those of the reference.

    Args:
        name: the name of the loss.
        reference: the file with the results of the reference, which writes it.
        target_share: the share of the tokens that are not ignored.
        autocast: whether products are in bfloat16.
    """
    loss = available_losses()[name]()
    generator = torch.Generator().manual_seed(0)
    small = make_inputs(generator, positions=64, vocabulary=1000, target_share=target_share)
    forward_backward(loss, small, autocast)  # one-time work

    inputs = make_inputs(generator, POSITIONS, VOCABULARY, target_share)
    peak_before = peak_bytes()
    cpu_start = time.process_time()
    start = time.perf_counter()
    results = forward_backward(loss, inputs, autocast)
    costs: Figures = {
        "seconds": time.perf_counter() - start,
        "CPU seconds": time.process_time() - cpu_start,
        "GB": (peak_bytes() - peak_before) / 1e9,
    }

    if name == "whole logits":
        torch.save(results, reference)
    expected_results = torch.load(reference)
    for key, result in results.items():
        expected = expected_results[key]
        costs[f"{key} error"] = float((result - expected).abs().max() / expected.abs().max())
    print(json.dumps(costs))


def make_inputs(
    generator: torch.Generator, positions: int, vocabulary: int, target_share: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random hidden states, output weight and targets."""
    targets = torch.randint(vocabulary, (ROWS, positions), generator=generator)
    is_ignored = torch.rand(targets.shape, generator=generator) >= target_share
    targets[is_ignored] = IGNORED
    hidden = torch.randn(ROWS, positions, WIDTH, generator=generator)
    weight = torch.randn(vocabulary, WIDTH, generator=generator).mul_(0.05)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def forward_backward(
    loss: Loss, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], autocast: bool
) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of the hidden states and of the weight."""
    hidden, weight, targets = inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll = loss(hidden, weight, targets)
    denominator = 1000  # any number, as training divides by the number of tokens
    (nll / denominator).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"loss": nll.detach(), "hidden": hidden.grad, "weight": weight.grad}


def peak_bytes() -> int:
    """Return the peak memory of this process, or of the one that started it if that was more."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


# The table


def compare(table: Table, shape: str, turns: dict[str, Turns[Figures]]) -> None:
    """Add the rows about all losses."""
    table.add(
        work=f"loss, {shape}",
        against="whole logits",
        ours=turns["llmtrain"].median_of("seconds"),
        theirs=turns["whole logits"].median_of("seconds"),
        unit="seconds",
        target="<= 1.05",
    )
    for name, against in (
        ("torch", "torch's linear_cross_entropy"),
        ("torch, fastest", "the same, fastest options"),
        ("TRL", "TRL"),
    ):
        if name in turns:
            table.add(
                work=f"loss, {shape}",
                against=f"{against}: memory",
                ours=turns["llmtrain"].median_of("GB"),
                theirs=turns[name].median_of("GB"),
                unit="GB",
                target="<= 1.0",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--autocast", choices=["bf16"], help="products in bfloat16 (default: float32)"
    )
    parser.add_argument(
        "--trained",
        dest="target_share",
        type=float,
        default=1.0,
        help="share of the tokens that are not ignored",
    )
    parser.add_argument("--turn", nargs=2, metavar=("LOSS", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turn:
        name, reference = arguments.turn
        print_costs(
            name,
            Path(reference),
            target_share=arguments.target_share,
            autocast=arguments.autocast is not None,
        )
        return

    with scratch() as folder:
        command = [sys.executable, "-m", "benchmarks.loss"]
        command += flags(autocast=arguments.autocast, trained=arguments.target_share)
        contenders = {
            name: partial(
                run_for_json,
                [*command, *flags(turn=(name, folder / "reference"))],
                torch.get_num_threads(),
            )
            for name in available_losses()
        }
        turns: dict[str, Turns[Figures]] = take_turns(contenders, rounds=ROUNDS, warm_up_rounds=0)

    shape = f"{ROWS * POSITIONS} tokens x {WIDTH} x {VOCABULARY}, {arguments.autocast or 'float32'}"
    share = f"{arguments.target_share:.0%} target tokens"
    say("shape", f"{shape}, {share}, {torch.get_num_threads()} threads")
    for name, contender in turns.items():
        costs = {key: contender.median_of(key) for key in contender.results[0]}
        say(name, ", ".join(f"{key} {cost:.3g}" for key, cost in costs.items()))

    table = Table("loss")
    compare(table, shape, turns)
    if arguments.target_share == 1 and not arguments.autocast:
        seconds = {name: contender.median_of("seconds") for name, contender in turns.items()}
        table.write(seconds=seconds)


if __name__ == "__main__":
    launch(main)
