"""The names that ``--report_to`` takes: Accelerate's trackers, and those registered with it."""

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from llmtrain.errors import UserError


def check_trackers(names: list[str]) -> None:
    """Check the values of ``--report_to``.

    Raises:
        UserError: if a tracker is unknown or not installed, or if the values contradict each other.
    """
    if "none" in names and len(names) > 1:
        raise UserError(
            f"--report_to {' '.join(names)}: none contradicts the others; leave one of them out."
        )
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in ("none", *LOGGER_TYPE_TO_CLASS):
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"--report_to {name} is not known: use {known} or none.")
        if name in LoggerType.list() and name not in available:
            raise UserError(f"--report_to {name} is not installed: pip install {name}.")
