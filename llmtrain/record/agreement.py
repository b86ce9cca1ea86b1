"""What all processes of a run must agree on: what they are about to do, and whether the main one could do its part."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from llmtrain.errors import UserError
from llmtrain.record.provenance import code_digest, difference, versions
from llmtrain.record.team import attempt, value_of

# Flags that may differ between machines: where things are, and what only the main process does.
_LOCAL_FLAGS = {"dataset", "tokenizer", "output_dir", "run_name", "resume_from_checkpoint", "report_to"}


def check_same_everywhere(
    accelerator: Accelerator, identity: dict[str, Any], settings: dict[str, dict[str, Any]]
) -> None:
    """Stop, on all processes, where one of them is about to train something else or with something else: each machine
    may have its own command, data, packages and code. Raises :class:`UserError` naming the rank and both values."""
    if accelerator.num_processes == 1:
        return
    flags = {name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS}
    precision = accelerator.mixed_precision
    mine = {"flags": flags, **identity, "precision": precision, "versions": versions(), "code": code_digest()}
    everyone = gather_object([mine])
    for other, theirs in enumerate(everyone):
        for key, value in everyone[0].items():
            if theirs.get(key) != value:
                raise UserError(f"rank {other} differs from rank 0 in {key}: {difference(theirs.get(key), value)}.")


def on_main(accelerator: Accelerator, action: Any) -> Any:
    """What ``action`` returns on the main process, told to all; its :class:`UserError` becomes everyone's."""
    told: list[Any] = [attempt(action) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        told = broadcast_object_list(told)
    return _agreed(told)[0]


def on_all(accelerator: Accelerator, action: Any) -> None:
    """Run ``action`` on every process; the :class:`UserError` of one becomes everyone's."""
    _agreed(gather_object([attempt(action)]))


def _agreed(outcomes: list[Any]) -> list[Any]:
    try:
        return [value_of(outcome) for outcome in outcomes]
    except OSError as error:
        raise UserError(f"{error}.") from None
