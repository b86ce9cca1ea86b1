"""Predict the memory and the time of a run, without training anything.

For each way to divide the model among the processes, this prints the memory of a process, the
largest micro-batch that fits, the seconds of a step, and the hours of the run. It needs no memory
for the weights."""

import argparse
import sys
from typing import TYPE_CHECKING

from llmtrain.console import duration_text, labelled, pluralize, rate_text, size_text
from llmtrain.devices import USUAL_MFU
from llmtrain.files import JsonObject, json_text
from llmtrain.recipe_arguments import add_recipe_arguments, check_recipe

if TYPE_CHECKING:
    from llmtrain.lab.plan.fit import Fit
    from llmtrain.lab.plan.layouts import Plan, PlannedLayout

EXAMPLES = (
    "llmtrain plan recipes/gpt.py",
    "llmtrain plan recipes/finetune.py --from_config llama --tokenizer byte --processes 8 "
    "--device h100-80gb --gradient_checkpointing --sync_each_batch --config_overrides "
    "hidden_size=4096,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,"
    "intermediate_size=14336,vocab_size=128256    # a Llama with 8 billion parameters",
    "llmtrain plan recipes/gpt.py --processes 64 --device h100-80gb --link 400Gbit "
    "--global_batch_size 512",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes, one for each device (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device to plan for, such as h100-80gb, or cpu (default: this machine's)",
    )
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="rate at which a process sends to another machine, such as 400Gbit",
    )
    parser.add_argument(
        "--per_machine",
        type=int,
        metavar="N",
        help="processes per machine (default: the usual number for this device)",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=USUAL_MFU,
        metavar="X",
        help="fraction of the device's peak that the run reaches (default: %(default)s)",
    )
    parser.add_argument(
        "--fit",
        metavar="SIZE",
        help="print the cheapest flags with which the run fits into so much memory per process, "
        "such as 80gb, instead of the tables",
    )


def run(arguments: argparse.Namespace) -> None:
    check_recipe(arguments.recipe)
    from llmtrain.lab.plan.fit import find_fit
    from llmtrain.lab.plan.hardware import PlanRequest
    from llmtrain.lab.plan.layouts import make_plan

    options = {
        name: value for name, value in vars(arguments).items() if name in PlanRequest._fields
    }
    request = PlanRequest(**options)
    if arguments.fit is not None:
        fit = find_fit(request, arguments.fit)
        if arguments.json:
            print(json_text(_fit_as_json(fit), indent=1))
        else:
            _print_fit(fit, arguments.fit)
        return

    plan = make_plan(request)
    if arguments.json:
        print(json_text(as_json(plan), indent=1))
        return

    _print_head(arguments, plan)
    _print_tables(plan)
    for layout in plan.layouts:
        if plan.memory.decides_recomputation and layout.recomputes:
            print(f"note: {layout.name}: all blocks recompute activations", file=sys.stderr)
    for reason in plan.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def as_json(plan: "Plan") -> JsonObject:
    """Return the layouts of a plan as a JSON object."""
    return {
        "bytes_per_parameter": _bytes_per_parameter(plan),
        "layouts": [_layout_as_json(layout) for layout in plan.layouts],
        "left_out": plan.left_out,
    }


def _layout_as_json(layout: "PlannedLayout") -> JsonObject:
    """Return a layout as a JSON object."""
    step = layout.step
    return {
        "name": layout.name,
        "bytes": layout.bytes._asdict(),
        "largest": layout.largest,
        "rows": layout.rows,
        "accumulation": layout.accumulation,
        "recomputes": layout.recomputes,
        "step": None if step is None else {**step._asdict(), "total": step.total},
        "tokens_per_second": layout.tokens_per_second,
        "hours": layout.hours,
    }


def _bytes_per_parameter(plan: "Plan") -> dict[str, float]:
    """Return the bytes of a trained parameter by kind, in the mean of all parameters."""
    trained = [p for p in plan.memory.parameters if p.is_trained]
    numel = sum(p.numel() for p in trained) or 1
    weights = float(sum(p.numel() * p.element_bytes for p in trained)) / numel
    compensation = sum(p.state["compensation"].nbytes for p in trained if "compensation" in p.state)
    state = sum(p.state_bytes() for p in trained)
    return {
        "weights": weights,
        "gradients": weights,
        "moments": (state - compensation) / numel,
        "compensation": compensation / numel,
    }


# --- flags with which a run fits


def _fit_as_json(fit: "Fit") -> JsonObject:
    """Return the flags with which a run fits as a JSON object."""
    from llmtrain.lab.plan.fit import changed_flags

    return {
        "fits": fit.fits,
        "limit": fit.limit,
        "command": fit.command,
        "machines": fit.machines,
        "flags": changed_flags(fit.chosen),
        "layout": _layout_as_json(fit.chosen),
        "too_large": None if fit.too_large is None else _layout_as_json(fit.too_large),
    }


def _print_fit(fit: "Fit", size: str) -> None:
    from llmtrain.lab.plan.fit import PROMISES, changed_flags

    layout = fit.chosen
    needed = f"{size_text(layout.bytes.total)} of {size_text(fit.limit)} ({size})"
    if fit.fits:
        print(labelled("fits", f"{layout.name}: {needed}{_step_text(layout)}"))
    else:
        print(labelled("too large", f"{layout.name}: {needed}, with all flags that save memory"))
        print(labelled("instead", "more --processes, --lora_r 16, or shorter rows"))
    print(labelled("command", fit.command))
    if fit.machines > 1:
        text = (
            f"start it on each of {fit.machines}, with its own --machine_rank from 0 on; ADDRESS "
            "is that of the first"
        )
        print(labelled("machines", text))
    for name, value in changed_flags(layout).items():
        print(labelled("changed", f"{f'--{name} {value}':<36} {PROMISES[name]}"))


def _step_text(layout: "PlannedLayout") -> str:
    return "" if layout.step is None else f", {duration_text(layout.step.total)} per step"


# --- the lines above the tables


def _print_head(arguments: argparse.Namespace, plan: "Plan") -> None:
    from llmtrain.lab.plan.hardware import device_name

    recipe = plan.memory.recipe
    parameters = [*recipe.model.parameters()]
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    model = f"{recipe.class_name}: {count:,} parameters"
    if trained < count:
        model += f", {trained:,} of them trained"
    if recipe.flops_per_token:
        flops = rate_text(recipe.flops_per_token, "FLOPs")
        model += f"; {flops} per token, forward and backward"
    print(labelled("model", model))
    for name, frozen in recipe.frozen.items():
        count = sum(p.numel() for p in frozen.parameters())
        print(labelled(name, f"{recipe._replace(model=frozen).class_name}: {count:,} parameters"))

    settings = recipe.settings
    rows = f"{settings.data.global_batch_size:,} rows of {recipe.rows.positions:,} tokens"
    precision = "bf16" if plan.memory.bf16 else "float32"
    print(labelled("run", f"{settings.optim.max_steps:,} steps of {rows}, {precision}"))

    kinds = _bytes_per_parameter(plan)
    per_kind = ", ".join(f"{kind} {size:.4g}" for kind, size in kinds.items() if size)
    print(labelled("bytes", f"{sum(kinds.values()):.4g} per trained parameter: {per_kind}"))

    cluster = plan.cluster
    devices = f"{arguments.processes:,} x {device_name(arguments.device)}"
    inside = rate_text(cluster.inside.bandwidth, "B/s")
    between = rate_text(cluster.between.bandwidth, "B/s")
    links = f"{inside} inside a machine, {between} to another"
    print(labelled("devices", f"{devices}, {cluster.per_machine} per machine: {links}"))

    if plan.compute is None:
        return
    row_seconds = plan.compute.frozen + plan.compute.forward + plan.compute.backward
    speed = f"{duration_text(row_seconds)} per row, at {plan.mfu:.0%} of the peak (--mfu)"
    print(labelled("speed", speed))


# --- the tables


def _print_tables(plan: "Plan") -> None:
    sizes = {}
    kinds = [*plan.layouts[0].bytes._fields]
    if not plan.memory.frozen:
        kinds.remove("frozen")
    for layout in plan.layouts:
        largest = pluralize(layout.largest, "row") if layout.largest > 0 else "too much"
        texts = [size_text(getattr(layout.bytes, kind)) for kind in kinds]
        sizes[layout.name] = [*texts, largest]
    _print_table("memory per process", [*kinds, "largest"], sizes)

    times = {}
    for layout in plan.layouts:
        if layout.step is None:
            continue
        times[layout.name] = [
            f"{layout.accumulation} x {layout.rows}",
            duration_text(layout.step.compute),
            duration_text(layout.step.communication),
            duration_text(layout.step.exposed),
            duration_text(layout.step.total),
            f"{layout.tokens_per_second:,.0f}",
            duration_text(3600 * layout.hours),
        ]
    if not times:
        print(
            "\nThe speed of this model is unknown, because the FLOPs of a mixture of experts, or "
            "of a model without flops_per_token(), are not counted."
        )
        return
    heads = ["rows", "computing", "sending", "not hidden", "step", "tokens/s", "run"]
    _print_table("time per step", heads, times)


def _print_table(title: str, heads: list[str], cells_by_layout: dict[str, list[str]]) -> None:
    """Print a table with a title, heads of columns, and a line for each layout."""
    width = max(len("memory per process"), *map(len, cells_by_layout)) + 2
    print(f"\n{title:<{width}}" + "".join(f"{head:>13}" for head in heads))
    for name, cells in cells_by_layout.items():
        print(f"{name:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
