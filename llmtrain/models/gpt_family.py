"""The models that are trained from scratch, by the name of their architecture."""

from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.lfm2 import LFM2

_ARCHITECTURES: dict[str, type[GPT]] = {"gpt2": GPT, "lfm2": LFM2}


def build_gpt(config: GPTConfig, vocab_size: int, seed: int = 0) -> GPT:
    """Return the model that ``config.architecture`` names.

    Args:
        config: the architecture and its sizes.
        vocab_size: the number of tokens that the model knows.
        seed: of the initial weights. On the meta device they are not initialised yet.
    """
    return _ARCHITECTURES[config.architecture](config, vocab_size, seed)
