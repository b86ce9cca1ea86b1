"""Answers of a causal LM to a group of prompts, and their log-probabilities.

Prompts are padded on the left, so that the next tokens of all answers are in one column, and keys
and values are kept. A model that keeps something else, such as the state of a recurrent layer,
computes all tokens again for each new one, with padding on the right, which nothing sees.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llmtrain.interfaces.batches import IGNORED, Batch
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.generation import Sampling, sample_tokens
from llmtrain.models.loss import target_positions_of
from llmtrain.parallel.engine import Engine


@torch.no_grad()
def answer(
    engine: Engine,
    prompts: Sequence[list[int]],
    numbers: Sequence[int],
    sampling: Sampling,
    stop_token_ids: Collection[int],
    width: int,
    vocabulary: int,
) -> list[list[int]]:
    """Return an answer to each prompt of a group, with the token that ends it, if there is one.

    If the model is sharded, all ranks call this, each with a group, and make the same passes.

    Args:
        engine: computes the student's logits. The model is in eval mode.
        prompts: the tokens of each prompt.
        numbers: the number of each prompt, which chooses its random numbers.
        sampling: the temperature, and the most tokens of an answer.
        stop_token_ids: the tokens that end an answer.
        width: the most tokens of a prompt and its answer.
        vocabulary: tokens from this number on are never sampled.
    """
    generators = [sampling.generator(number) for number in numbers]
    limits = [min(len(prompt) + sampling.max_new_tokens, width) for prompt in prompts]
    texts = [[*prompt] for prompt in prompts]
    is_open = [len(text) < limit for text, limit in zip(texts, limits, strict=True)]

    continuation = _Continuation(engine, prompts, width)
    while _is_any_open(engine, is_open):
        # A rank may hang for minutes, but not longer than a pass takes.
        engine.phases.begin("a round")
        logits = continuation.next_logits(texts, is_open)
        tokens = sample_tokens(logits[:, :vocabulary], sampling, generators)

        for row, token in enumerate(tokens):
            if is_open[row]:
                texts[row].append(token)
                is_open[row] = token not in stop_token_ids and len(texts[row]) < limits[row]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


class _Continuation:
    """Computes the next tokens of some texts, with a cache if the model keeps keys and values.

    Args:
        engine: computes the logits.
        prompts: the tokens that the texts begin with.
        width: the most tokens of a text.
    """

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], width: int) -> None:
        self.engine = engine
        self.width = width
        self.cache: Any = None
        self.keeps_cache = True

        # What the cache does not hold yet. Padding on the left is masked.
        rows = [torch.tensor(prompt) for prompt in prompts]
        self.new_ids = pad_sequence(rows, batch_first=True, padding_side="left")
        ones = [torch.ones_like(row) for row in rows]
        self.mask = pad_sequence(ones, batch_first=True, padding_side="left")
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)

    def next_logits(self, texts: Sequence[list[int]], is_open: Sequence[bool]) -> Tensor:
        """Return the logits [B, V] after the last token of each text.

        The rows of complete texts are computed, too, and nothing looks at them. Those of a rank may
        all be complete before those of another one.
        """
        if self.cache is not None:  # it holds all tokens but the last ones
            self.new_ids = torch.tensor([[text[-1]] for text in texts])
            self.mask = torch.cat([self.mask, torch.tensor(is_open).long()[:, None]], dim=1)
            self.positions = torch.tensor([[min(len(text), self.width - 1) - 1] for text in texts])
        if self.keeps_cache:
            logits: Tensor
            logits, self.cache = self.engine.unwrapped(
                self.new_ids.to(self.engine.device),
                attention_mask=self.mask.to(self.engine.device),
                position_ids=self.positions.to(self.engine.device),
                past_key_values=self.cache,
                compute=_logits_with_cache,
            )
            self.keeps_cache = self.cache is not None
        if self.keeps_cache:
            return logits

        padded = pad_sequence([torch.tensor([*text, 0]) for text in texts], batch_first=True)
        padded = padded.to(self.engine.device)
        last = [row * (padded.shape[1] - 1) + len(text) - 1 for row, text in enumerate(texts)]
        positions = torch.tensor(last, device=padded.device)
        logits = self.engine.unwrapped(
            padded, compute=lambda model, batch: model.logits_at(positions, batch["input_ids"])
        )
        return logits


def _is_any_open(engine: Engine, is_open: list[bool]) -> bool:
    """Return whether an answer is not complete, of this rank or of one that shares the model."""
    if not engine.ranks.is_sharded:
        return any(is_open)
    count = torch.tensor(sum(is_open), device=engine.device)
    return bool(engine.ranks.sum_over_ranks(count) > 0)


def _logits_with_cache(model: CausalLM, batch: Batch) -> tuple[Tensor, Any]:
    """Return the logits [B, V] after the last tokens, and the cache; ``None`` if it is no use."""
    del batch["labels"]
    if model.head_is_linear:
        output: Any = model.base_model(**batch, use_cache=True)
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits = model.softcapped(head(output.last_hidden_state[:, -1]).float())
    else:
        output = model.own_forward(**batch, use_cache=True)
        logits = output.logits[:, -1].float()

    cache = getattr(output, "past_key_values", None)
    kinds = {type(layer) for layer in getattr(cache, "layers", [])}
    has_only_keys = kinds and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    return logits, cache if has_only_keys else None


def target_log_probabilities(model: CausalLM, batch: Batch) -> Tensor:
    """Return the log-probability of each target, float32 [targets], as training computes it."""
    return -model.nll(**batch, per_target=True).float()


def scoring_batch(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], device: torch.device
) -> Batch:
    """Return prompts with their answers, which are the targets, as a micro-batch."""
    texts = []
    labels = []
    for prompt, ids in zip(prompts, answers, strict=True):
        texts.append(torch.tensor([*prompt, *ids]))
        labels.append(torch.tensor([IGNORED] * len(prompt) + ids))
    batch = {
        "input_ids": pad_sequence(texts, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    batch["target_positions"] = target_positions_of(batch["labels"])
    return {name: column.to(device) for name, column in batch.items()}
