"""The cost of the loss of a long vocabulary, forward and backward: each try in a process of its own, kinds in turn.

OMP_NUM_THREADS=1 python -m benchmarks.loss [--autocast bf16] [--trained 0.3]
"""

import argparse
import importlib.util
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.comparison import Row, report
from benchmarks.runs import figure, scratch
from llmtrain.console import say
from llmtrain.interfaces.batches import IGNORED
from llmtrain.launching.process import launch
from llmtrain.models.loss import linear_nll, summed_nll

ROUNDS = 3
ROWS, POSITIONS, WIDTH, VOCABULARY = 2, 1024, 512, 151_936
CHUNK = 256  # tokens, of the options that were tried the fastest

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return summed_nll(F.linear(hidden, weight), targets)


def torch_op(tokens: int | None = None) -> Loss:
    """Return torch's loss with its default options, or with so many tokens at a time."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tokens)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):  # of which the operation takes no notice
            hidden, weight = hidden.bfloat16(), weight.bfloat16()
        return F.linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
            options=options,
        )

    return loss


def trl_kernel() -> Loss:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import (
        _CHUNKED_LOGPROB_CHUNK_SIZE as ROWS_OF_THE_HEAD,  # its backward imports this module
    )

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute what its trainers do on a CPU, where ignored tokens are computed and masked; without metrics."""
        labels = targets.clamp(min=0).flatten()
        arguments = hidden.flatten(0, 1), weight, None, labels, 1.0, ROWS_OF_THE_HEAD, None, 1.0, ()
        return (
            -ChunkedLogProbFunction.apply(*arguments)[0]
            .masked_fill(targets.flatten() == IGNORED, 0)
            .sum()
        )

    return loss


def kinds() -> dict[str, Callable[[], Loss]]:
    found: dict[str, Callable[[], Loss]] = {"ours": lambda: linear_nll, "plain": lambda: plain}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = torch_op
        found[f"torch, {CHUNK} tokens"] = lambda: torch_op(CHUNK)
    else:
        say("torch", f"skipped: {torch.__version__} has no linear_cross_entropy")
    if importlib.util.find_spec("trl"):
        found["trl"] = trl_kernel
    else:
        say("trl", "skipped: it is not installed")
    return found


def peak() -> int:
    """Return the most bytes of this process so far; and of the one that started it, which must stay small."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def measure(
    loss: Loss, trained: float, autocast: bool
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Return the cost of one forward and backward, and the loss and the gradients of hidden and weight."""
    generator = torch.Generator().manual_seed(0)

    def inputs(positions: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        targets = torch.randint(vocabulary, (ROWS, positions), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) >= trained] = IGNORED
        hidden = torch.randn(ROWS, positions, WIDTH, generator=generator)
        weight = torch.randn(vocabulary, WIDTH, generator=generator).mul_(0.05)
        return hidden.requires_grad_(), weight.requires_grad_(), targets

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
    ) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            nll = loss(hidden, weight, targets)
        (nll / 1000).backward()  # as by the number of tokens
        assert hidden.grad is not None
        assert weight.grad is not None
        return [nll.detach(), hidden.grad, weight.grad]

    run(*inputs(64, 1000))  # what is only done once
    arguments = inputs(POSITIONS, VOCABULARY)
    before, began, worked = peak(), time.perf_counter(), time.process_time()
    outcome = run(*arguments)
    cost = {
        "seconds": time.perf_counter() - began,
        "CPU": time.process_time() - worked,
        "bytes": peak() - before,
    }
    return cost, outcome


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Return the largest difference in each tensor, relative to the largest number in it."""
    pairs = zip(found, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--autocast", choices=["bf16"], help="products in bfloat16 (default: float32)"
    )
    parser.add_argument(
        "--trained", type=float, default=1.0, help="share of the tokens that are not ignored"
    )
    parser.add_argument(
        "--one", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS
    )  # for a process of its own
    arguments = parser.parse_args()
    if arguments.one:
        kind, file = arguments.one
        cost, outcome = measure(kinds()[kind](), arguments.trained, arguments.autocast is not None)
        if kind == "plain":
            torch.save(outcome, file)
        print(json.dumps([cost, differences(outcome, torch.load(file))]))
        return
    names, costs = list(kinds()), defaultdict[str, list[dict[str, float]]](list)
    apart: dict[str, list[float]] = {}
    with scratch() as folder:
        for _ in range(ROUNDS):
            for name in sorted(
                names, key=lambda name: name != "plain"
            ):  # with which the others compare theirs
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.loss",
                    *sys.argv[1:],
                    "--one",
                    name,
                    folder / "plain",
                ]
                cost, apart[name] = figure(command, torch.get_num_threads())
                costs[name].append(cost)
    medians = {
        name: {key: statistics.median(cost[key] for cost in tries) for key in tries[0]}
        for name, tries in costs.items()
    }
    shape = f"{ROWS * POSITIONS} tokens x {WIDTH} x {VOCABULARY}, {arguments.autocast or 'float32'}"
    say("shape", f"{shape}, {arguments.trained:.0%} trained, {torch.get_num_threads()} threads")
    print(
        f"{'':18}{'peak GB':>9}{'':8}{'seconds':>9}{'':8}{'CPU s':>9}{'':8}  difference: loss, hidden, weight"
    )
    for name in names:
        cells = (
            f"{medians[name][key] / unit:9.2f}{medians[name][key] / medians['ours'][key]:7.2f}x"
            for key, unit in (("bytes", 1e9), ("seconds", 1), ("CPU", 1))
        )
        print(f"{name:18}{''.join(cells)}  {' '.join(f'{number:.0e}' for number in apart[name])}")
    ours, work = medians["ours"], f"loss, {shape}"
    rows = [
        Row(
            work, "whole logits", ours["seconds"], medians["plain"]["seconds"], "seconds", "<= 1.05"
        )
    ]
    for name, peer in (
        ("torch", "torch's linear_cross_entropy"),
        (f"torch, {CHUNK} tokens", "it, best"),
        ("trl", "TRL"),
    ):
        if name in medians:
            rows.append(
                Row(
                    work,
                    f"{peer}: memory",
                    ours["bytes"] / 1e9,
                    medians[name]["bytes"] / 1e9,
                    "GB",
                    "<= 1.0",
                )
            )
    if arguments.trained == 1 and not arguments.autocast:
        report("loss", rows, seconds={name: medians[name]["seconds"] for name in names})


if __name__ == "__main__":
    launch(main)
