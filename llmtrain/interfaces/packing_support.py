"""What a model can do with several documents in a row."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackingSupport:
    """What rows a model can be trained on.

    Attributes:
        packing_problem: why rows are not packed, for the log; empty if they are.
        shares_prompts: whether two answers can follow one copy of their prompt.
    """

    packing_problem: str = ""
    shares_prompts: bool = False
