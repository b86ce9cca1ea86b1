"""Losses that compare answers, in front of a Hugging Face model: formulas, and the model that they are taken of.

The log-probability of an answer is the sum over its judged tokens. All formulas are TRL's (docs/preference.md tells
where they differ), and those of these papers:

- ``sigmoid``: DPO, Rafailov et al. 2023, arXiv:2305.18290; smoothed, conservative DPO (Mitchell 2023).
- ``robust``: Chowdhury et al. 2024, arXiv:2403.00409.
- ``ipo``: Azar et al. 2023, arXiv:2310.12036, of the mean over an answer's tokens, as its authors meant it.
- ``kto``: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
- ``orpo``: Hong et al. 2024, arXiv:2403.07691. ``simpo``: Meng et al. 2024, arXiv:2405.14734.
- ``reward``: Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.contract import IGNORED, Batch
from llmtrain.errors import UserError
from llmtrain.models.attention import NAME, Documents
from llmtrain.models.config import PreferenceConfig
from llmtrain.models.loss import inputs_of, targets_of
from llmtrain.models.summed import (
    SummedLoss,
    arguments_of,
    differ,
    smallest_window,
    tokens_of,
    trying,
)

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput


class Answers(NamedTuple):
    """The two answers of pairs [..., 2], chosen and rejected; of an answer that is judged alone it is the first."""

    logps: Tensor  # log-probabilities in nats, or scores
    tokens: Tensor  # that are judged
    reference: Tensor  # log-probabilities under the first weights
    desirable: Tensor  # bool [...]: the first


def losses(config: PreferenceConfig, answers: Answers, baseline: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair [...] and the rewards of its answers [..., 2].

    Args:
        baseline: how far the model has moved from the reference, in nats an answer. Only ``kto``
            compares with it.
    """
    beta = config.beta
    mean_logps = answers.logps / answers.tokens
    log_ratios = answers.logps - answers.reference

    match config.loss_type:
        case "reward":
            rewards = answers.logps
        case "orpo" | "simpo":
            rewards = beta * mean_logps
        case _:
            rewards = beta * log_ratios
    margin = rewards[..., 0] - rewards[..., 1]

    match config.loss_type:
        case "ipo":
            mean_ratios = log_ratios / answers.tokens
            distance = mean_ratios[..., 0] - mean_ratios[..., 1] - 1 / (2 * beta)
            return distance**2, rewards
        case "kto":
            above = rewards[..., 0] - beta * baseline
            loss_if_desirable = config.desirable_weight * (1 - torch.sigmoid(above))
            loss_if_undesirable = config.undesirable_weight * (1 - torch.sigmoid(-above))
            loss = torch.where(answers.desirable, loss_if_desirable, loss_if_undesirable)
            return loss, rewards
        case "orpo":
            log_odds = mean_logps - _log1mexp(mean_logps)
            log_odds_ratio = log_odds[..., 0] - log_odds[..., 1]
            return -mean_logps[..., 0] - beta * F.logsigmoid(log_odds_ratio), rewards
        case "simpo":
            margin = margin - config.simpo_gamma

    smoothing = config.label_smoothing
    loss_if_right = -F.logsigmoid(margin)
    loss_if_swapped = -F.logsigmoid(-margin)
    if config.loss_type == "robust":
        unbiased = (1 - smoothing) * loss_if_right - smoothing * loss_if_swapped
        return unbiased / (1 - 2 * smoothing), rewards
    return (1 - smoothing) * loss_if_right + smoothing * loss_if_swapped, rewards


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of negative numbers, accurate both near zero and far from it.

    It is equation 7 of Mächler 2012, "Accurately computing log(1 - exp(-|a|))". Numbers that
    rounding has brought to zero, or above, count as the largest negative number.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near_zero = x > -math.log(2)

    # The branch that is not taken gets -1: NaN there would become NaN in the gradient of both.
    near_zero = torch.log(-torch.expm1(x.where(is_near_zero, -1)))
    far_from_zero = torch.log1p(-torch.exp(x.where(~is_near_zero, -1)))
    return torch.where(is_near_zero, near_zero, far_from_zero)


class PreferenceLoss(SummedLoss):  # type: ignore[no-untyped-call]
    """A ``forward`` that returns the summed loss of the pairs in rows."""

    preference: PreferenceConfig
    slots: int  # answers that a row has, at most
    packs: bool  # several pairs a row; else each answer has half of one
    shares_prompts: bool
    surveyed_as: ClassVar[str] = "kl"
    sums: Tensor | None = None  # of what is measured, since it was last asked for

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        answers: Tensor | None = None,
        reference: Tensor | None = None,
        load: Tensor | None = None,
        survey: bool = False,
        logps: bool = False,
        hidden: bool = False,
        **others: Any,
    ) -> "Tensor | ModelOutput":
        """Return the loss summed over the pairs of rows [B, T], whose places ``answers`` [B, T] tells.

        Args:
            reference: float [B, slots], the log-probabilities of the answers under the first weights.
            load: the baseline of ``kto``, of :meth:`loads`.
            survey: return what that is made of, float64 [2].
            logps: return the log-probabilities themselves, float [B, slots].
            hidden: return the last hidden states [B, T, C].
        """
        if hidden:
            states: Tensor = self.base_model(input_ids=input_ids, **others).last_hidden_state
            device = states.device.type  # in the precision that they were computed in
            return (
                states.to(torch.get_autocast_dtype(device))
                if torch.is_autocast_enabled(device)
                else states
            )
        if labels is None:
            return super().forward(input_ids, **others)
        rows = len(labels)
        answers = torch.zeros_like(labels) if answers is None else answers  # of a plan
        input_ids, labels, answers = (self._unfolded(one) for one in (input_ids, labels, answers))
        places, judged = self._judged(labels, answers)
        if self.preference.loss_type == "reward":
            values = self._scores(input_ids, labels, answers, rows, **others)
        else:
            if others.get("documents") is None and others.get("position_ids") is not None:
                others |= self._documents(others["position_ids"], answers)
            nll = cast(Tensor, super().forward(input_ids, labels, each=True, **others))
            trained = others.get("trained")
            each_place = places if trained is None else places[trained.clamp(min=0)]
            values = nll.new_zeros(rows * self.slots).index_add(0, each_place, -nll)
        if logps:
            return values.view(rows, self.slots)
        none = torch.zeros_like(values)
        tokens = none.index_add(0, places, judged.to(values.dtype))
        bad = (
            none.index_add(
                0, places, (judged & (targets_of(answers).flatten() & 2 > 0)).to(values.dtype)
            )
            > 0
        )
        first = none if reference is None else reference.to(values.dtype).flatten()
        values, tokens, first = (one.view(-1, 2) for one in (values, tokens, first))
        valid, both = tokens[:, 0] > 0, (tokens > 0).all(1)
        if survey:
            wide = torch.float32 if values.device.type == "mps" else torch.float64
            moved = ((values - first)[:, 1] * both).to(wide)
            moved = (
                moved * 2**30
            ).round() / 2**30  # whose sum, below 2^23 nats, is exact: the same in any order
            return torch.stack([moved.sum(), both.sum().to(wide)])
        if (
            self.preference.loss_type != "reward"
        ):  # numbers that every formula takes, where there is no answer
            values = values.where(tokens > 0, -1)
        found = Answers(values, tokens.clamp(min=1), first, ~bad.view(-1, 2)[:, 0])
        baseline = values.new_zeros(()) if load is None else load
        each, rewards = losses(self.preference, found, baseline)
        self._measure(found, valid, rewards, baseline)
        return (each * valid).sum()

    def prepare(self, batch: Batch) -> Batch:
        """Return where documents begin in a micro-batch on the host, and which of its targets are trained."""
        batch = {
            name: self._unfolded(one) if name != "reference" else one for name, one in batch.items()
        }
        found = (
            Batch()
            if self.preference.loss_type == "reward"
            else super().prepare({"labels": batch["labels"]})
        )
        if "position_ids" in batch:
            found |= self._documents(
                batch["position_ids"], batch["answers"], self.device.type == "cuda"
            )
        return found

    def told(self, arguments: dict[str, object]) -> Tensor:
        """Return logits for arguments of its own class's ``forward``; of a model that scores, hidden states."""
        if self.preference.loss_type == "reward":
            return cast(Tensor, self(**arguments, hidden=True))
        return super().told(arguments)

    def units(self, batch: Batch) -> Tensor:
        """Return the number of pairs in a micro-batch, an int64 scalar."""
        places, judged = self._judged(
            *(self._unfolded(batch[name]) for name in ("labels", "answers"))
        )
        counts = torch.zeros(
            len(batch["labels"]) * self.slots, dtype=torch.int64, device=judged.device
        )
        return (counts.index_add(0, places, judged.long())[::2] > 0).sum()

    @property
    def takes_reference(self) -> bool:
        """True where the loss compares with the first weights."""
        return self.preference.takes_reference

    def loads(self, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the baseline of ``kto`` for a global batch, in nats an answer; it is what is told of it, too."""
        baseline = (counts[0] / counts[1].clamp(min=1)).clamp(min=0)
        return baseline, baseline

    def measured(self) -> Tensor:
        """Return the sums beside the loss since this was last called, for :meth:`readings`."""
        found, self.sums = self.sums, None
        return torch.zeros(len(_SUMS), device=self.device) if found is None else found

    def readings(self, sums: Sequence[float]) -> dict[str, float]:
        """Return means over the answers by TRL's names: rewards, log-probabilities in nats, what is told right."""
        of = dict(zip(_SUMS, sums, strict=True))
        mean = {
            f"{what}/{which}": of[f"{what}/{which}"] / max(of[which], 1) for what, which in _MEANS
        }
        told = {
            "rewards/accuracies": of["right"] / max(of["pairs"], 1),
            "rewards/margins": mean["rewards/chosen"] - mean["rewards/rejected"],
            **mean,
        }
        if self.preference.loss_type == "reward":
            return {name: value for name, value in told.items() if name.startswith("rewards")}
        if self.preference.takes_reference and not self.preference.alone:
            told["kl"] = of["moved"] / max(2 * of["pairs"], 1)
        return told

    @torch.no_grad()
    def _measure(self, found: Answers, valid: Tensor, rewards: Tensor, baseline: Tensor) -> None:
        alone, logps = self.preference.alone, found.logps
        if alone:
            good, bad = valid & found.desirable, valid & ~found.desirable
            right = (rewards[:, 0] > self.preference.beta * baseline) == found.desirable
        else:
            good = bad = valid
            right = rewards[:, 0] > rewards[:, 1]
        last = 0 if alone else 1
        moved = (found.reference - logps).sum(1)
        counted = [(right, valid), (valid, valid), (good, good), (bad, bad), (moved, valid)]
        counted += [(one[:, 0], good) for one in (rewards, logps)] + [
            (one[:, last], bad) for one in (rewards, logps)
        ]
        sums = torch.stack([(one * which).sum().float() for one, which in counted])
        self.sums = sums if self.sums is None else self.sums + sums

    def _scores(
        self,
        input_ids: Tensor,
        labels: Tensor,
        answers: Tensor,
        rows: int,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return the scores of the answers [B * slots], each read at its last token."""
        if documents is None and position_ids is not None:
            documents = self._documents(position_ids, answers)["documents"]
        arguments = arguments_of(self, input_ids, position_ids, documents)
        hidden = self.base_model(**arguments).last_hidden_state
        scores: Tensor = self.get_submodule("score")(hidden).view(-1)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        places, judged = self._judged(F.pad(labels, (1, 0)), F.pad(answers, (1, 0)))
        here = torch.arange(labels.numel(), device=labels.device)
        last = here.new_zeros(rows * self.slots).scatter_reduce(0, places, here * judged, "amax")
        return scores[last]

    def _unfolded(self, column: Tensor) -> Tensor:
        """Return rows of one answer each, where a row is two halves."""
        return column if self.packs else column.view(2 * len(column), -1)

    def _judged(self, labels: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return of each target [R * (T - 1)] which answer of all rows it belongs to, and whether it is judged."""
        codes = targets_of(answers)
        row = torch.arange(len(codes), device=codes.device)[:, None] // (1 if self.packs else 2)
        places = row * self.slots + (codes >> 2) * 2 + (codes & 1)
        return places.clamp(min=0).flatten(), (targets_of(labels) != IGNORED).flatten()

    def _documents(self, position_ids: Tensor, answers: Tensor, on_gpu: bool = False) -> Batch:
        if self.preference.loss_type != "reward":
            position_ids, answers = inputs_of(position_ids), inputs_of(answers)
        own = answers.cpu() if self.shares_prompts else None
        found = Documents.of(position_ids.cpu(), on_gpu or position_ids.is_cuda, own)
        return {"documents": found.to(position_ids.device)}


_MEANS = (
    ("rewards", "chosen"),
    ("logps", "chosen"),
    ("rewards", "rejected"),
    ("logps", "rejected"),
)
_SUMS = (
    "right",
    "pairs",
    "chosen",
    "rejected",
    "moved",
    *(f"{what}/{which}" for what, which in _MEANS),
)


def check_answers(model: PreferenceLoss) -> None:
    """Try a model that has its weights; raises :class:`UserError` where answers that share a prompt see each other."""
    model.balance = float(model.preference.alone)
    if not model.shares_prompts:
        return
    with trying(model):
        prompt = min(model.row_length, (smallest_window(model) or 0) + 8) - 5
        ids = tokens_of(model, 1, prompt + 8)[0]
        first, second = ids[: prompt + 4], torch.cat([ids[:prompt], ids[prompt + 4 :]])
        row = torch.cat([first, second[prompt - 1 :]])[None]
        positions = torch.cat([torch.arange(prompt + 4), torch.arange(prompt - 1, prompt + 4)])[
            None
        ]
        answers = (torch.arange(row.shape[1]) >= prompt + 4).long()[None]
        documents = Documents.of(positions, row.is_cuda, answers).to(row.device)
        together = model.told(arguments_of(model, row, positions.to(row.device), documents))[0]
        apart = [
            model.told(arguments_of(model, one[None], None, None))[0, prompt - 1 :]
            for one in (first, second)
        ]
        if model.config._attn_implementation != NAME or differ(
            together[prompt - 1 :], torch.cat(apart)
        ):
            kind = model.own_class.__name__
            raise UserError(
                f"{kind} cannot share a prompt between two answers: use --no_share_prompts."
            )
