"""Check whether this machine, or several together, can train.

It looks at versions, devices, the launcher's config, the run folder and servers. With several
machines it also looks at which processes come, how fast they send, and whether clocks and versions
agree. For that, start it on each machine with its --machine_rank, or under the launcher: accelerate
launch --config_file FILE -m llmtrain doctor. The exit status is 1 if something is bad.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text, local_path
from llmtrain.json_types import JsonObject
from llmtrain.launching.children import read_accelerate_config
from llmtrain.redaction import redacted

if TYPE_CHECKING:
    from llmtrain.lab.doctor.group_checks import Process
    from llmtrain.lab.doctor.local_checks import Finding

EXAMPLES = (
    "llmtrain doctor",
    "accelerate launch --config_file FILE -m llmtrain doctor",
)


class _Sign(NamedTuple):
    """How the report shows a level."""

    text: str
    colour: str  # code of the terminal


_SIGNS = {
    "good": _Sign("ok", "32"),
    "doubtful": _Sign("look", "33"),
    "bad": _Sign("BAD", "31"),
}
# Flags of this command that accelerate launch also takes.
_MACHINE_FLAGS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
_DEFAULT_PORT = 29500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir",
        type=local_path,
        default="runs",
        metavar="DIR",
        help="where runs are kept (default: runs)",
    )
    parser.add_argument(
        "--config_file",
        metavar="FILE",
        help="accelerate config that sets the following four options",
    )
    parser.add_argument(
        "--num_machines", type=int, metavar="N", help="number of machines that train together"
    )
    parser.add_argument(
        "--machine_rank", type=int, metavar="R", help="number of this machine; the first is 0"
    )
    parser.add_argument("--main_process_ip", metavar="ADDRESS", help="address of the first machine")
    parser.add_argument(
        "--main_process_port",
        type=int,
        metavar="PORT",
        help="port of the first machine (default: 29500)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for other processes (default: 60)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.doctor import local_checks
    from llmtrain.launching.launcher import launched_by

    config = read_accelerate_config(arguments.config_file) if arguments.config_file else {}
    _act_as_launcher(config | _machine_flags(arguments))
    on_cpu = launched_by().on_cpu or bool(config.get("use_cpu"))
    findings = local_checks.findings(Path(arguments.output_dir), on_cpu)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(_report(findings, arguments.json))

    status = _check_group(arguments, on_cpu, findings)
    os._exit(status)  # gloo's threads sometimes abort a process that is done


def _check_group(
    arguments: argparse.Namespace, on_cpu: bool, local_findings: "list[Finding]"
) -> int:
    """Check several processes together, and return the exit status of this one.

    The first process prints the report. If some processes do not come, or if one is lost, each
    prints its own findings.
    """
    from llmtrain.lab.doctor import group_checks, local_checks

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    has_several_machines = world_size > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    uses_gloo = local_checks.uses_gloo(on_cpu)
    if has_several_machines and uses_gloo:
        local_findings = local_findings + local_checks.check_address()

    backend = "gloo" if uses_gloo else "nccl"
    joined = group_checks.join_group(backend, timeout=arguments.wait)
    if not joined.is_complete:
        if joined.findings:
            _report(local_findings + joined.findings, arguments.json)
        return 1

    try:
        group_findings = group_checks.findings(Path(arguments.output_dir))
        findings_by_process = group_checks.gather((group_checks.this_process(), local_findings))
        status = 0
        if group_checks.this_process().rank == 0:
            merged = _merge_findings(findings_by_process)
            status = _report([*merged, *joined.findings, *group_findings], arguments.json)
        group_checks.leave_group()
        return status
    except RuntimeError as error:  # a process has gone meanwhile
        lost = local_checks.Finding(
            local_checks.BAD, "meeting", f"another process was lost: {first_line(error)}"
        )
        return _report([*local_findings, *joined.findings, lost], arguments.json)


def _act_as_launcher(config: JsonObject) -> None:
    """Set the variables of a launcher with one process per machine, if there is no launcher.

    Nothing is set for a single machine. A real launcher waits for a machine that does not come for
    a quarter of an hour, without a message.

    Args:
        config: an accelerate config.
    """
    machines = config.get("num_machines")
    rank = config.get("machine_rank")
    address = config.get("main_process_ip")
    port = config.get("main_process_port")
    if "WORLD_SIZE" in os.environ or machines in (None, 1):
        return

    if rank is None or address is None:
        raise UserError(
            "with several machines, give each its --machine_rank, and the address of the first "
            "machine as --main_process_ip."
        )
    if rank not in range(machines):
        raise UserError(
            f"--machine_rank {rank}: with {machines} machines, it must be from 0 to {machines - 1}."
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(machines),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(address),
        "MASTER_PORT": str(port or _DEFAULT_PORT),
    }


def _machine_flags(arguments: argparse.Namespace) -> JsonObject:
    """Return the flags about machines that the user passed."""
    values = {name: getattr(arguments, name) for name in _MACHINE_FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def _merge_findings(
    findings_by_process: "list[tuple[Process, list[Finding]]]",
) -> "list[Finding]":
    """Return the findings of all machines.

    A machine's findings are those of its first process, and those of the others about devices. A
    finding that all machines have is returned once. The others begin with the machine.
    """
    machines: dict[int, tuple[Process, list[Finding]]] = {}
    for process, findings in findings_by_process:
        first_process, machine_findings = machines.setdefault(process.machine, (process, []))
        if process is first_process:
            machine_findings += findings
        else:
            machine_findings += [
                finding
                for finding in findings
                if finding.subject == "devices" and finding not in machine_findings
            ]

    merged: list[Finding] = []
    for number, (process, findings) in sorted(machines.items()):
        for finding in findings:
            if not all(finding in others for _, others in machines.values()):
                text = f"{process.host} (machine {number}): {finding.text}"
                merged.append(finding._replace(text=text))
            elif finding not in merged:
                merged.append(finding)
    return merged


def _report(findings: "list[Finding]", as_json: bool) -> int:
    """Print findings, and return the status to end with."""
    if as_json:
        print(json_text(redacted([finding._asdict() for finding in findings]), indent=1))
    else:
        for finding in findings:
            print(redacted(_line(finding)))
    sys.stdout.flush()
    is_bad = any(finding.level == "bad" for finding in findings)
    return 1 if is_bad else 0


def _line(finding: "Finding") -> str:
    sign = _SIGNS[finding.level]
    sign_text = f"{sign.text:<5}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        sign_text = f"\x1b[{sign.colour}m{sign_text}\x1b[0m"
    remedy = f" - {finding.remedy}" if finding.remedy else ""
    return f"{sign_text} {finding.subject:<11} {finding.text}{remedy}"
