"""The one place where labels are shifted, and the sum that every model of this package returns."""

import torch
import torch.nn.functional as F

IGNORED = -100  # cross_entropy's own default, and Hugging Face's: a label that is not trained on


def targets_of(labels: torch.Tensor) -> torch.Tensor:
    """What each position is to predict: [B, T] -> [B, T - 1]."""
    return labels[:, 1:]


def inputs_of(input_ids: torch.Tensor) -> torch.Tensor:
    """The positions that predict something: [B, T] -> [B, T - 1]. The last has no next token."""
    return input_ids[:, :-1]


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Number of trained tokens in ``labels`` [B, T], counted after the shift; an int64 scalar."""
    return (targets_of(labels) != IGNORED).sum()


def summed_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood in nats, summed over the targets that are not ignored, in float32 (or wider).

    A sum, not a mean: only a sum adds up over micro-batches and processes.

    Args:
        logits: [B, T, V].
        targets: [B, T], already shifted.
    """
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
