"""Say whether this machine, or several together, can train.

It looks at versions, devices, the launcher's config, the run's folder and servers; and between machines at who has
come, how fast they send, whose clock and versions differ. For several, start it on each with its --machine_rank; or
under the launcher: accelerate launch --config_file FILE -m llmtrain doctor. Status 1 where something is bad.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text
from llmtrain.launching.children import read_config
from llmtrain.types import Facts

if TYPE_CHECKING:
    from llmtrain.doctor.here import Finding
    from llmtrain.doctor.together import Place

_SIGNS = {
    "good": ("ok", "32"),
    "doubtful": ("look", "33"),
    "bad": ("BAD", "31"),
}  # with their terminal colours
_RANKS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_MEETING = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir", default="runs", metavar="DIR", help="where runs are kept (default: runs)"
    )
    parser.add_argument(
        "--config_file", metavar="FILE", help="accelerate config that says the four below"
    )
    parser.add_argument("--num_machines", type=int, metavar="N", help="that are to train together")
    parser.add_argument("--machine_rank", type=int, metavar="R", help="of this one; the first is 0")
    parser.add_argument("--main_process_ip", metavar="ADDRESS", help="of the first")
    parser.add_argument(
        "--main_process_port", type=int, metavar="PORT", help="of the first (default: 29500)"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="for other processes (default: 60)"
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.doctor import here, together
    from llmtrain.launching.launcher import Launcher

    _act_as_launcher(arguments)
    launcher = Launcher.find()
    if not launcher.words:
        launcher = Launcher.to_come(
            [f"--{name}={value}" for name, value in _said(arguments, "config_file").items()]
        )
    output_dir = Path(arguments.output_dir)
    status = 1
    rank, world, local = (int(os.environ.get(name, one)) for name, one in _RANKS.items())
    mine = here.findings(output_dir, launcher)
    if world == 1:
        sys.exit(_tell(mine, arguments.json))
    over_gloo = here.over_gloo(launcher)
    mine += here.address() if world > local and over_gloo else []
    met, all_came = together.meet("gloo" if over_gloo else "nccl", arguments.wait)
    if all_came:
        try:
            found = together.findings(output_dir)
            everyone = together.gathered((together.here(), mine))
            status = (
                _tell([*_by_machine(everyone), *met, *found], arguments.json) if rank == 0 else 0
            )
            together.part()
        except RuntimeError as error:  # somebody has gone in the middle of it
            lost = here.Finding(
                here.BAD, "meeting", f"another process was lost: {first_line(error)}"
            )
            status = _tell([*mine, *met, lost], arguments.json)
    elif met:
        _tell(mine + met, arguments.json)
    os._exit(status)  # gloo's threads sometimes abort a process that is done


def _act_as_launcher(arguments: argparse.Namespace) -> None:
    """Set the variables of a launcher with one process a machine, if several machines are asked for and there is none.

    A launcher itself waits for a quarter of an hour, without a word, for a machine that does not come.
    """
    config = read_config(arguments.config_file) if arguments.config_file else {}
    config |= _said(arguments)
    machines, rank, address, port = (config.get(name) for name in _MEETING)
    if "WORLD_SIZE" in os.environ or machines in (None, 1):
        return

    if rank is None or address is None:
        raise UserError(
            "each of several machines needs --machine_rank, and --main_process_ip, the address of the first."
        )
    if rank not in range(machines):
        raise UserError(
            f"--machine_rank {rank}: of {machines} machines it is from 0 to {machines - 1}."
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(machines),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port or 29500),
    }


def _said(arguments: argparse.Namespace, *more: str) -> Facts:
    """Return the flags that were given and are also a launcher's."""
    return {
        name: value
        for name in (*more, *_MEETING)
        if (value := getattr(arguments, name)) is not None
    }


def _by_machine(everyone: "list[tuple[Place, list[Finding]]]") -> "list[Finding]":
    """Return what the first process of each machine found, and the others of their GPUs; what all found alike once."""
    machines: dict[int, tuple[Place, list[Finding]]] = {}
    for place, found in everyone:
        first, known = machines.setdefault(place.machine, (place, []))
        known += [
            one
            for one in found
            if place is first or (one.subject == "devices" and one not in known)
        ]
    result = []
    for number, (place, found) in sorted(machines.items()):
        for one in found:
            if not all(one in theirs for _, theirs in machines.values()):
                result.append(one._replace(said=f"{place.host} (machine {number}): {one.said}"))
            elif one not in result:
                result.append(one)
    return result


def _tell(found: "list[Finding]", as_json: bool) -> int:
    """Print what was found; returns the status to end with."""
    if as_json:
        print(json_text([one._asdict() for one in found], indent=1))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        for one in found:
            sign, code = _SIGNS[one.level]
            sign = f"\x1b[{code}m{sign:<5}\x1b[0m" if colour else f"{sign:<5}"
            print(f"{sign} {one.subject:<11} {one.said}{f' - {one.remedy}' if one.remedy else ''}")
    sys.stdout.flush()
    return int(any(one.level == "bad" for one in found))
