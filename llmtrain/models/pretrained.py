"""Model folders and hub names as what they are: input that nobody has vouched for. No code of theirs is run."""

from pathlib import Path
from typing import Any

from llmtrain.errors import UserError

# For every `from_pretrained`; without the first, transformers asks on the terminal whether to run what it found.
DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
WEIGHTS_ONLY: dict[str, Any] = {**DATA_ONLY, "use_safetensors": True}

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse_pickles(name: str) -> None:
    """Raise :class:`UserError` for a folder whose weights are pickles alone: reading one can run any code."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise UserError(
                f"{name} holds its weights as a pickle ({path.name}), which can run code when it is read, and not as "
                "safetensors; save it again with save_pretrained where you trust it."
            )
