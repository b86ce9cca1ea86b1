"""Generate text from a model folder, token by token, with a key-value cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from llmtrain.errors import UserError, first_line, refused_as
from llmtrain.files import read_object
from llmtrain.models.export import gives_scores
from llmtrain.models.lora import adapted_model, is_adapter
from llmtrain.models.untrusted import DATA_ONLY, load_causal_lm, refuse_pickles

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. A ``temperature`` of 0 takes the likeliest token; a ``top_k`` of 0 keeps all tokens."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_k"):
            value = getattr(self, name)
            if not value >= 0:
                raise UserError(f"{name} {value} is out of range: it must be at least 0.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed {self.seed} is out of range: it must be from 0 to 2**63 - 1.")


class TextModel:
    """A causal LM and its tokenizer, loaded from a folder or hub name to generate text.

    Attributes:
        model: The model, on the GPU if there is one.
        tokenizer: Its tokenizer.
        context: The largest number of tokens that the model can take.
        ends: The tokens at which it stops.
    """

    def __init__(self, name: str) -> None:
        folder = Path(name)
        if folder.is_dir() and not holds_model(folder):
            raise UserError(f"{name} holds no model (no config.json).")
        if gives_scores(read_object(folder / "config.json")):
            raise UserError(
                f"{name} is a reward model, which scores answers and cannot write; name a causal LM."
            )
        refuse_pickles(name)
        self.tokenizer = tokenizer_of(name)
        with refused_as(f"{name}: no model could be loaded"):
            loaded: PeftModel | PreTrainedModel
            if is_adapter(folder):
                loaded = adapted_model(name, len(self.tokenizer))
            else:
                loaded = load_causal_lm(name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = cast("PreTrainedModel", loaded.eval().to(device))
        self.context: int = getattr(self.model.config, "max_position_embeddings", None) or 2**31

        stop_token_ids = getattr(self.model.generation_config, "eos_token_id", None)
        # An adapter has a file of its own: its base does not know what ends the turns that it was trained on.
        own_settings = folder / "generation_config.json"
        if is_adapter(folder) and own_settings.exists():
            stop_token_ids = json.loads(own_settings.read_text())["eos_token_id"]
        if not isinstance(stop_token_ids, list):
            stop_token_ids = [stop_token_ids]
        self.ends = {*stop_token_ids, self.tokenizer.eos_token_id}

    def check_chats(self) -> None:
        """Raise :class:`UserError` if the tokenizer has no chat template."""
        if self.tokenizer.chat_template is None:
            raise UserError(
                "this model has no chat template: it can only continue text; use llmtrain generate."
            )

    def fitting_prompt(
        self, messages: list[dict[str, str]], kept: int, answer: int, thinking: bool = True
    ) -> tuple[int, list[int]]:
        """Render the prompt for the next answer, without the oldest messages if they do not fit.

        Args:
            messages: The conversation, which ends with a question.
            kept: The number of messages at its beginning that are never dropped.
            answer: The number of tokens to leave for the answer.
            thinking: If false, ask the template for an answer without reasoning, if it has that switch.

        Returns:
            The number of messages that were dropped, always questions with their answers, and the tokens of the prompt.
        """
        switch: dict[str, Any] = {} if thinking else {"enable_thinking": False}
        dropped = 0
        while True:
            shown = [*messages[:kept], *messages[kept + dropped :]]
            with refused_as("the chat template refuses this", first_line):
                text = self.tokenizer.apply_chat_template(
                    shown, add_generation_prompt=True, tokenize=False, **switch
                )
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            fits = len(ids) + answer <= self.context
            is_last_question = kept + dropped + 2 >= len(messages)
            if fits or is_last_question:
                return dropped, ids
            dropped += 2

    @torch.no_grad()
    def stream(self, prompt: str | list[int], sampling: Sampling) -> Iterator[str]:
        """Generate a continuation of a prompt, and yield it in pieces of text.

        Generation ends at a stop token or after ``max_new_tokens``. If the prompt and the continuation fill the model's
        ``context``, the older half is dropped, and the cache is computed again from the rest.

        Args:
            prompt: A text or its tokens.
            sampling: How tokens are drawn.
        """
        generator = torch.Generator().manual_seed(sampling.seed)
        ids = self._prompt_ids(prompt)
        ids = ids[-max(self.context - 1, 1) :]

        new_ids = ids  # tokens that the cache does not hold yet
        cache = None
        generated: list[int] = []
        yielded = ""
        for _ in range(sampling.max_new_tokens):
            if len(ids) >= self.context:
                ids = ids[-max(self.context // 2, 1) :]
                new_ids = ids
                cache = None
            out = self.model(
                torch.tensor([new_ids], device=self.model.device),
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            token = draw(out.logits[0, -1].float().cpu(), sampling, generator)
            if token in self.ends:
                break

            ids = [*ids, token]
            new_ids = [token]
            generated.append(token)
            text = str(self.tokenizer.decode(generated, skip_special_tokens=True))
            # A character may have several tokens. Wait until it is complete.
            is_partial = text.endswith("\N{REPLACEMENT CHARACTER}")
            if not is_partial:
                yield text[len(yielded) :]
                yielded = text

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a prompt; of an empty one, the token that begins a text."""
        tokenizer = self.tokenizer
        if not prompt:
            first = (
                tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            )
            ids = [] if first is None else [first]
        elif isinstance(prompt, str):
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        else:
            ids = prompt
        if not ids:
            raise UserError(
                "this model's tokenizer has no token to begin a text with; give a --prompt."
            )
        return ids


def logits_apart(one: str, other: str) -> tuple[float, float]:
    """Compare the logits of two model folders, in float32.

    Returns:
        Their largest difference, and the largest logit of the first.
    """
    first = _some_logits(TextModel(one))
    second = _some_logits(TextModel(other))
    return float((first - second).abs().max()), float(first.abs().max())


@torch.no_grad()
def _some_logits(model: TextModel) -> torch.Tensor:
    """Return logits [1, T, V] for tokens from all over the vocabulary; the first ones are its last, often new ones."""
    model.model.to(dtype=torch.float32)  # type: ignore[call-arg]
    size = len(model.tokenizer)
    newest = range(size - min(16, size), size)
    spread = (7 * i % size for i in range(48))
    ids = [*newest, *spread][: model.context]
    out = model.model(torch.tensor([ids], device=model.model.device), use_cache=False)
    return cast(torch.Tensor, out.logits)


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw the next token from its ``logits`` [V]."""
    if sampling.temperature < 1e-6:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def tokenizer_of(name: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model folder or hub name; raises :class:`UserError` if there is none."""
    from transformers import AutoTokenizer

    with refused_as(f"{name}: no model could be loaded"):
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(name, **DATA_ONLY))


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model, or an adapter."""
    return (folder / "config.json").exists() or is_adapter(folder)


def model_folder(name: str) -> str:
    """Return the model folder that a name stands for.

    In a run folder, that is the finished model, or else the newest checkpoint's. A model folder or a hub name stands for
    itself.

    Raises:
        UserError: If there is no such folder, or if it holds no model yet.
    """
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise UserError(f"{name} is not a folder; check the path.")
        return name
    if holds_model(folder):
        return name

    checkpoints = sorted(folder.glob("checkpoints/step-*/model"), reverse=True)
    for candidate in [folder / "model", *checkpoints]:
        if holds_model(candidate):
            return str(candidate)
    raise UserError(f"{name} holds no model yet: no config.json, no model/ and no checkpoint.")
