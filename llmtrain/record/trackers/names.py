"""The names that ``--report_to`` takes: Accelerate's trackers, and those registered with it."""

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from llmtrain.errors import UserError

# What pip installs, if it is not simply the tracker's name. Accelerate does not accept aim 4.
# MLflow without its server, and with the packages of its SQLite store.
_REQUIREMENTS = {
    "aim": "'aim<4'",
    "comet_ml": "comet-ml",
    "mlflow": "mlflow-skinny sqlalchemy alembic",
    "trackio": "'trackio>=0.20'",
}


def installed_trackers() -> list[str]:
    """Return the names of those trackers whose packages are installed."""
    built_in = set(LoggerType.list())
    available = {str(tracker) for tracker in get_available_trackers()}
    return [
        name for name in sorted(LOGGER_TYPE_TO_CLASS) if name in available or name not in built_in
    ]


def check_trackers(names: list[str]) -> None:
    """Check the values of ``--report_to``.

    Raises:
        UserError: if a tracker is unknown or not installed, or if the values contradict each other.
    """
    for name in names:
        if name not in ("all", "none", *LOGGER_TYPE_TO_CLASS):
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise UserError(f"--report_to {name} is not known: use {known}, all or none.")
    others = [name for name in names if name != "none"]
    if others and "none" in names:
        raise UserError(
            f"--report_to none and {' '.join(others)} contradict each other; leave one of them out."
        )
    for name in others:
        if name != "all" and name not in installed_trackers():
            raise UserError(
                f"--report_to {name}: its package is not installed; install it with "
                f"pip install {_REQUIREMENTS.get(name, name)}."
            )


def chosen_trackers(names: list[str]) -> list[str]:
    """Return the trackers that the values of ``--report_to`` name, each once."""
    chosen: list[str] = []
    for name in names:
        candidates = installed_trackers() if name == "all" else [name]
        chosen += [other for other in candidates if other not in ("none", *chosen)]
    return chosen
