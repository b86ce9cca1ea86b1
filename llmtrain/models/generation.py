"""Text from a model folder, token by token, with a key-value cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from llmtrain.errors import UserError, first_line, refused_as, require
from llmtrain.files import read_object
from llmtrain.models.export import gives_scores
from llmtrain.models.lora import adapted_model, is_adapter
from llmtrain.models.untrusted import DATA_ONLY, load_causal_lm, refuse_pickles

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. ``temperature`` 0 takes the likeliest; ``top_k`` 0 leaves all in the draw."""

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "temperature", "top_k"):
            require(
                getattr(self, name) >= 0,
                f"{name} {getattr(self, name)} is out of range: it must be at least 0.",
            )
        require(
            0 <= self.seed < 2**63,
            f"seed {self.seed} is out of range: it must be from 0 to 2**63 - 1.",
        )


class TextModel:
    """A causal LM and its tokenizer, loaded from a folder or hub name."""

    def __init__(self, name: str) -> None:
        folder = Path(name)
        require(
            holds_model(folder) or not folder.is_dir(), f"{name} holds no model (no config.json)."
        )
        config = read_object(folder / "config.json")
        require(
            not gives_scores(config),
            f"{name} gives answers a score, and writes none; name a model that writes.",
        )
        refuse_pickles(name)
        self.tokenizer = tokenizer_of(name)
        with refused_as(f"{name}: no model could be loaded"):
            loaded = (
                adapted_model(name, len(self.tokenizer))
                if is_adapter(folder)
                else load_causal_lm(name)
            )
        self.model = cast(
            "PreTrainedModel", loaded.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        )
        self.context: int = getattr(self.model.config, "max_position_embeddings", None) or 2**31
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        own = (
            folder / "generation_config.json"
        )  # an adapter's, whose base knows nothing of its turns
        if is_adapter(folder) and own.exists():
            ends = json.loads(own.read_text())["eos_token_id"]
        self.ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}

    def check_chats(self) -> None:
        """Raise :class:`UserError` where the tokenizer has no chat template."""
        absent = "this model has no chat template: it continues text; use llmtrain generate."
        require(self.tokenizer.chat_template is not None, absent)

    def fitting_prompt(
        self, messages: list[dict[str, str]], kept: int, answer: int, thinking: bool = True
    ) -> tuple[int, list[int]]:
        """Return the tokens that ask for an answer of up to ``answer`` tokens, after the number of messages dropped.

        It is one without reasoning if not ``thinking``, where the template can ask for that. Messages after the first
        ``kept`` go where there is no room, questions together with their answers.
        """
        dropped = 0
        switch: dict[str, Any] = {} if thinking else {"enable_thinking": False}
        while True:
            told = [*messages[:kept], *messages[kept + dropped :]]
            with refused_as("the chat template refuses this", first_line):
                text = self.tokenizer.apply_chat_template(
                    told, add_generation_prompt=True, tokenize=False, **switch
                )
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) + answer <= self.context or kept + dropped + 2 >= len(messages):
                return dropped, ids
            dropped += 2

    @torch.no_grad()
    def stream(self, prompt: str | list[int], sampling: Sampling) -> Iterator[str]:
        """Yield pieces of text that continue ``prompt``, a text or its tokens.

        It ends with a text or a turn, or after ``max_new_tokens``. A model with learned positions sees ``context``
        tokens. When they are full, the older half is forgotten and the cache is filled anew from the rest.
        """
        generator = torch.Generator().manual_seed(sampling.seed)
        words = self.tokenizer
        ids = (
            words(prompt, add_special_tokens=False)["input_ids"]
            if isinstance(prompt, str)
            else prompt
        )
        if not prompt:
            ids = [words.eos_token_id if words.bos_token_id is None else words.bos_token_id]
        require(
            ids and ids != [None],
            "this model's tokenizer has no token to begin a text with; give a --prompt.",
        )
        ids = ids[-max(self.context - 1, 1) :]
        fresh, cache, made, shown = ids, None, list[int](), ""
        for _ in range(sampling.max_new_tokens):
            if len(ids) >= self.context:
                ids = ids[-max(self.context // 2, 1) :]
                fresh, cache = ids, None
            out = self.model(
                torch.tensor([fresh], device=self.model.device),
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            token = draw(out.logits[0, -1].float().cpu(), sampling, generator)
            if token in self.ends:
                break
            ids, fresh = [*ids, token], [token]
            made.append(token)
            text = str(words.decode(made, skip_special_tokens=True))
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # wait for the rest of a character
                yield text[len(shown) :]
                shown = text


def logits_apart(one: str, other: str) -> tuple[float, float]:
    """Return by how much the logits of two model folders differ at most, and their largest size, in float32."""
    first, second = (_some_logits(TextModel(name)) for name in (one, other))
    return float((first - second).abs().max()), float(first.abs().max())


@torch.no_grad()
def _some_logits(model: TextModel) -> torch.Tensor:
    """Return logits [1, T, V] of tokens from all over the vocabulary, the last of which may be new ones."""
    model.model.to(dtype=torch.float32)  # type: ignore[call-arg]
    size = len(model.tokenizer)
    ids = [*range(size - min(16, size), size), *(7 * i % size for i in range(48))][: model.context]
    out = model.model(torch.tensor([ids], device=model.model.device), use_cache=False)
    return cast(torch.Tensor, out.logits)


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw the next token by its ``logits`` [V]."""
    if sampling.temperature < 1e-6:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def tokenizer_of(name: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model folder or hub name. Raises :class:`UserError` where there is none."""
    from transformers import AutoTokenizer

    with refused_as(f"{name}: no model could be loaded"):
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(name, **DATA_ONLY))


def holds_model(folder: Path) -> bool:
    """Return whether there is a model, or an adapter of one."""
    return (folder / "config.json").exists() or is_adapter(folder)


def model_folder(name: str) -> str:
    """Return the model of a run folder (finished, else the newest checkpoint's), or ``name`` itself."""
    run = Path(name)
    require(run.is_dir() or not name.startswith((".", "/", "~")), f"{name} is no folder.")
    if not run.is_dir() or holds_model(run):
        return name
    for folder in (run / "model", *sorted(run.glob("checkpoints/step-*/model"), reverse=True)):
        if holds_model(folder):
            return str(folder)
    raise UserError(f"{name} holds no model yet: no config.json, no model/ and no checkpoint.")
