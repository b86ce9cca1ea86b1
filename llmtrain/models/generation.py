"""Generate text from a model folder, token by token, with a key-value cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from llmtrain.config.flags import require_range
from llmtrain.errors import UserError, as_user_error
from llmtrain.model_folders import as_token_ids, is_adapter, stop_token_ids
from llmtrain.models.adapters import adapted_model, tokenizer_with_base
from llmtrain.models.export import MODULE_CLASS, folder_config, gives_scores, how_to_load
from llmtrain.models.hub_models import load_pretrained
from llmtrain.seeds import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


_PARTIAL_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# How many tokens before a text are decoded with it.
_TOKENS_BEFORE = 64


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        max_new_tokens: the most tokens of a continuation.
        temperature: logits are divided by it. 0 takes the likeliest token.
        top_k: sample from the K most likely tokens. 0 samples from all.
        seed: of the random numbers.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        require_range(self, "max_new_tokens", "temperature", "top_k", "seed", at_least=0)

    def generator(self, number: int, turn: int = 0) -> torch.Generator:
        """Return the random numbers of an answer, which depend on no other answer.

        Args:
            number: the number of its prompt.
            turn: the number of earlier answers in its conversation.
        """
        return torch.Generator().manual_seed(seed_of(self.seed, "prompt", number, turn))


class TextModel:
    """A causal LM and its tokenizer, loaded from a folder or hub name to generate text.

    Attributes:
        model: the model, on the GPU if there is one.
        tokenizer: its tokenizer.
        context: the largest number of tokens that the model can take.
        stop_token_ids: the tokens that end a text.

    Args:
        name: the folder of a model or of an adapter, or a hub name.

    Raises:
        UserError: if there is no such model, or if it cannot generate text.
    """

    def __init__(self, name: str) -> None:
        folder = Path(name)
        # If `name` is a hub name, there is no such file, and read_object returns an empty object.
        config = folder_config(folder)
        if MODULE_CLASS in config or gives_scores(config):
            raise UserError(
                f"{name} cannot write text ({how_to_load(folder)}); name a causal language model."
            )

        self.tokenizer = tokenizer_with_base(name)
        with as_user_error(f"{name}: no model could be loaded"):
            if is_adapter(folder):
                loaded: torch.nn.Module = adapted_model(folder, len(self.tokenizer))
            else:
                loaded = load_pretrained(name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = cast("PreTrainedModel", loaded.eval().to(device))
        text_config = self.model.config.get_text_config()
        self.context: int = getattr(text_config, "max_position_embeddings", None) or 2**31

        # The base of an adapter does not know the tokens that end the turns of a conversation. The
        # adapter's folder may have its own settings.
        of_base = getattr(self.model.generation_config, "eos_token_id", None)
        self.stop_token_ids = {
            *(stop_token_ids(folder) or as_token_ids(of_base)),
            *as_token_ids(self.tokenizer.eos_token_id),
        }

    @torch.no_grad()
    def stream(
        self, prompt: list[int], sampling: Sampling, number: int = 0, turn: int = 0
    ) -> Iterator[str]:
        """Generate a continuation of a prompt, and yield it in pieces of text.

        Generation ends at a stop token or after ``max_new_tokens``. If the prompt and the
        continuation fill the model's ``context``, the older half is dropped, and the cache is
        computed again from the rest.

        Args:
            prompt: its tokens; see :class:`llmtrain.data.prompts.Prompts`.
            sampling: how tokens are sampled.
            number: the number of the prompt; see :meth:`Sampling.generator`.
            turn: the number of earlier answers in its conversation.
        """
        generator = sampling.generator(number, turn)
        # One less than the context: if the prompt filled it, the loop would drop the older half.
        ids = prompt[-max(self.context - 1, 1) :]
        new_ids = ids  # tokens that the cache does not hold yet
        cache: dict[str, object] = {}
        generated: list[int] = []
        text = ""
        yielded = ""
        for _ in range(sampling.max_new_tokens):
            if len(ids) >= self.context:
                ids = ids[-max(self.context // 2, 1) :]
                new_ids = ids
                cache = {}
            input_ids = torch.tensor([new_ids], device=self.model.device)
            out = self.model(input_ids, use_cache=True, **cache)
            # transformers 5.24 renamed it. Some recurrent models keep their state elsewhere, and
            # GPT-1 keeps none. Those compute all tokens again.
            cache = {name: out[name] for name in ("cache", "past_key_values") if name in out}
            token = sample_token(out.logits[0, -1].float().cpu(), sampling, generator)
            if token in self.stop_token_ids:
                break

            ids = [*ids, token]
            new_ids = [token] if cache else ids
            generated.append(token)
            text = continuation_text(self.tokenizer, prompt, generated)
            # A character may have several tokens. Wait until it is complete.
            if not text.endswith(_PARTIAL_CHARACTER):
                yield text[len(yielded) :]
                yielded = text
        if text != yielded:  # it ends with a part of a character
            yield text[len(yielded) :]


def sample_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample the next token from its logits [V]."""
    if sampling.temperature < 1e-6:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        smallest_kept = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def sample_tokens(
    logits: torch.Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[int]:
    """Sample the next token of each text from all tokens, whatever ``sampling.top_k`` is.

    A text takes one random number for a token, so this is faster than :func:`sample_token`, and its
    tokens are others.

    Args:
        logits: [B, V].
        sampling: the temperature.
        generators: the random numbers of each text.
    """
    if sampling.temperature < 1e-6:
        return [int(token) for token in logits.argmax(-1)]
    # On the host, because adding up on a GPU may depend on the order.
    probabilities = (logits.cpu().double() / sampling.temperature).softmax(-1)
    sums = probabilities.cumsum(-1)
    drawn = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    # The first token whose sum is above the random share of the total, which rounding may make 1.
    tokens = torch.searchsorted(sums, torch.stack(drawn) * sums[:, -1:], right=True)
    return [int(token) for token in tokens.clamp(max=logits.shape[-1] - 1)]


def continuation_text(
    tokenizer: "PreTrainedTokenizerFast",
    prompt: Sequence[int],
    generated: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of generated tokens, as it follows the text of the prompt.

    Decoders like Llama's drop the space before the first word of a text. So tokens of the prompt
    are decoded, too, and their text is cut off.
    """
    tokens_before = list(prompt[-_TOKENS_BEFORE:])
    tokens = [*tokens_before, *generated]
    before = str(tokenizer.decode(tokens_before, skip_special_tokens=skip_special_tokens))
    text = str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))
    if not text.startswith(before):
        # The prompt ends within a character, with which the continuation begins.
        before = before.rstrip(_PARTIAL_CHARACTER)
    return text[len(before) :]
