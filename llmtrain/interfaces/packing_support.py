"""What a model can do with several documents in a row."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackingSupport:
    """What rows a model can be trained on.

    Attributes:
        class_name: the class.
        packs: whether packed documents do not see each other.
        shares_prompts: whether two answers can follow one copy of their prompt.
        problem: why this is not known, in which case both are false; empty if it is known.
    """

    class_name: str
    packs: bool = False
    shares_prompts: bool = False
    problem: str = ""

    @property
    def packing_problem(self) -> str:
        """Why rows are not packed, for the log."""
        if not self.problem:
            return f"{self.class_name} lets the documents of a packed row see each other"
        return (
            f"it is not known whether {self.class_name} keeps packed documents apart, because "
            f"{self.problem} (--packing packs them)"
        )
