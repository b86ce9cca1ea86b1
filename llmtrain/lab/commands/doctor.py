"""Check whether this machine, or several together, can train.

It looks at versions, devices, the launcher's config and the run folder. With several
machines it also looks at which processes come, how fast they send, and whether versions agree.
For that, start it on each machine with its --machine_rank, or under the launcher: accelerate launch
--config_file FILE -m llmtrain doctor. The exit status is 1 if something is bad.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.files import json_text, local_path
from llmtrain.redaction import redacted

if TYPE_CHECKING:
    from llmtrain.lab.doctor.local_checks import Finding

EXAMPLES = (
    "llmtrain doctor",
    "accelerate launch --config_file FILE -m llmtrain doctor",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output_dir",
        type=local_path,
        default="runs",
        metavar="DIR",
        help="where runs are kept (default: runs)",
    )
    # The next four are those of accelerate launch.
    parser.add_argument(
        "--num_machines",
        type=int,
        default=1,
        metavar="N",
        help="number of machines that train together",
    )
    parser.add_argument(
        "--machine_rank", type=int, metavar="R", help="number of this machine; the first is 0"
    )
    parser.add_argument("--main_process_ip", metavar="ADDRESS", help="address of the first machine")
    parser.add_argument(
        "--main_process_port",
        type=int,
        default=29500,
        metavar="PORT",
        help="port of the first machine (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for other processes (default: 60)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.doctor import group_checks, local_checks

    _act_as_launcher(arguments)
    output_dir = Path(arguments.output_dir)
    findings = local_checks.findings(output_dir)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    # A launch without an address is among the findings.
    if is_alone or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        sys.exit(_report(findings, arguments.json))

    backend = "gloo" if local_checks.uses_gloo() else "nccl"
    findings = group_checks.findings(output_dir, findings, backend, timeout=arguments.wait)
    status = _report(findings, arguments.json)
    os._exit(status)  # gloo's threads sometimes abort a process that is done


def _act_as_launcher(arguments: argparse.Namespace) -> None:
    """Set the variables of a launcher with one process per machine, if there is no launcher.

    Nothing is set for a single machine. A real launcher waits for a machine that does not come for
    a quarter of an hour, without a message.
    """
    machines = arguments.num_machines
    rank = arguments.machine_rank
    port = arguments.main_process_port
    if machines < 1:
        raise UserError(f"--num_machines {machines}: name at least one machine.")
    if port not in range(1, 2**16):
        raise UserError(f"--main_process_port {port}: a port is a number from 1 to 65535.")
    if "WORLD_SIZE" in os.environ or machines == 1:
        return

    if rank not in range(machines) or arguments.main_process_ip is None:
        raise UserError(
            f"with {machines} machines, give each its --machine_rank from 0 to {machines - 1}, and "
            "the address of the first machine as --main_process_ip."
        )
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(machines),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": arguments.main_process_ip,
        "MASTER_PORT": str(port),
    }


def _report(findings: "list[Finding]", as_json: bool) -> int:
    """Print the findings that this process reports, if any, and return its exit status."""
    if findings and as_json:
        print(json_text(redacted([finding._asdict() for finding in findings]), indent=1))
    elif findings:
        print("\n".join(redacted(str(finding)) for finding in findings))
    sys.stdout.flush()
    return int(any(finding.level == "BAD" for finding in findings))
