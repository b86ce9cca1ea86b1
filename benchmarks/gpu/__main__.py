"""Measure one GPU: correctness first, then this package, then others."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from benchmarks.gpu.call import Call

CALL_SECONDS = 530.0

_SCRATCH_BYTES = 40 << 30  # of all checkpoints

# Seconds that a section needs on a GPU. It is left out if fewer are left.
SECTION_SECONDS = {
    "machine": 10,
    "passes": 40,
    "curves": 30,
    "same-weights": 100,
    "gpt2": 120,
    "gpt2-own-vocabulary": 100,
    "recipe-model": 20,
    "loss": 10,
    "muon": 5,
    "billion": 30,
    "adapters": 90,
    "trl": 40,
}


def sections() -> dict[str, Callable[..., None]]:
    """Return what each section measures, in their order."""
    from benchmarks.gpu import gpt2, kernels, llama, passes, same_weights

    return {
        "machine": kernels.measure_machine,
        "passes": passes.judge,
        "curves": passes.judge_curves,
        "same-weights": same_weights.judge,
        "gpt2": gpt2.measure,
        "gpt2-own-vocabulary": gpt2.measure_own_vocabulary,
        "recipe-model": gpt2.measure_recipe_model,
        "loss": kernels.measure_loss,
        "muon": kernels.measure_muon,
        "billion": llama.measure_billion,
        "adapters": llama.measure_adapters,
        "trl": llama.measure_trl,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the sections; return 1 if a verdict was wrong or a section failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for figures.jsonl")
    parser.add_argument("--nanogpt", help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--sections", nargs="+", choices=list(SECTION_SECONDS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="time for all of it")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    arguments = parser.parse_args(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            "error: there is no GPU here; --rehearse tries everything at a tiny size on the CPU.",
            file=sys.stderr,
        )
        return 2

    out = arguments.out.absolute()
    # Beside the figures, so that a second call need not compile again.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(out / "inductor"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.rehearse:
        os.environ["ACCELERATE_USE_CPU"] = "true"

    from benchmarks.gpu.call import FULL, TINY, Call
    from benchmarks.gpu.journal import Journal
    from llmtrain.devices import DEVICES, known_device

    device = torch.device("cpu" if arguments.rehearse else "cuda")
    journal = Journal(out, seconds=arguments.seconds)
    peak = 0.0
    if not arguments.rehearse:
        journal.card = torch.cuda.get_device_name()
        name = known_device(journal.card)
        peak = 0.0 if name is None else DEVICES[name].peak
    with tempfile.TemporaryDirectory(prefix="llmtrain-gpu-", dir=_scratch_place()) as folder:
        call = Call(
            sizes=TINY if arguments.rehearse else FULL,
            device=device,
            journal=journal,
            folder=Path(folder),
            nanogpt=arguments.nanogpt,
            peak=peak,
        )
        run_sections(call, arguments.sections or list(SECTION_SECONDS))
    print(journal.table(), flush=True)
    return int(journal.has_failed)


def _scratch_place() -> str | None:
    """Return a folder in memory, if it holds the checkpoints; ``None`` for the usual place."""
    memory = "/dev/shm"
    if Path(memory).is_dir() and shutil.disk_usage(memory).free > _SCRATCH_BYTES:
        return memory
    return None


def run_sections(call: "Call", names: list[str]) -> None:
    """Run sections, as long as there is time for the next one."""
    known = sections()
    for name in names:
        needed = SECTION_SECONDS[name] if call.on_gpu else 0
        if call.journal.seconds_left < needed:
            reason = f"{call.journal.seconds_left:.0f} s were left, and it takes {needed} s"
            call.journal.record(name, name, left_out=reason)
            continue
        with call.journal.section(name):
            torch._dynamo.reset()
            known[name](call)


if __name__ == "__main__":
    sys.exit(main())
