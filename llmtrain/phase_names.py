"""The phases of a step, whose seconds a run logs."""

# The phases of a step in their order, with their names in messages.
PHASES = {
    "data": "data loading",
    "count": "the token count",
    "forward": "forward",
    "backward": "backward",
    "exchange": "the gradient exchange",
    # To read the norm, the host waits for its device, and the device waits for the other processes.
    "norm": "the gradient norm",
    "optimizer": "optimizer",
    "other": "other",
}
SYNC_PHASES = ("count", "exchange", "norm")  # in which processes wait for each other
OWN_PHASES = tuple(phase for phase in PHASES if phase not in SYNC_PHASES)


def describe_phase(phase: str) -> str:
    """Return the name of a phase, followed by its longer name if there is one."""
    return phase if PHASES[phase] == phase else f"{phase}: {PHASES[phase]}"
