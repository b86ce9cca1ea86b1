"""The losses that TRL's trainers compute from the log-probabilities of answers."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmtrain.models.preference import PreferenceConfig


def trl_dpo_loss(
    config: PreferenceConfig, answers: Sequence[tuple[Tensor, Tensor]], reference: Tensor
) -> Tensor:
    """Return the mean loss of pairs, as TRL's ``DPOTrainer`` computes it.

    Args:
        config: the losses and their parameters.
        answers: for each pair, the log-probability of every token of the chosen answer and of the
            rejected one.
        reference: log-probabilities under the reference model [pairs, 2].
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    chosen = [chosen_answer for chosen_answer, _ in answers]
    rejected = [rejected_answer for _, rejected_answer in answers]
    inputs, model = _batch([*chosen, *rejected])
    inputs["ref_chosen_logps"] = reference[:, 0]
    inputs["ref_rejected_logps"] = reference[:, 1]

    trainer = _trainer(
        config,
        loss_types=config.loss_type,
        loss_weights=config.loss_weights or [1.0] * len(config.loss_type),
        label_smoothing=config.label_smoothing,
        args=None,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
    )

    with _in_float64():
        loss: Tensor = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss


def trl_kto_loss(
    config: PreferenceConfig, answers: Sequence[Tensor], reference: Tensor, desirable: list[bool]
) -> Tensor:
    """Return the mean loss of single answers, as TRL's ``KTOTrainer`` computes it.

    Args:
        config: a loss without a baseline, and its parameters.
        answers: for each answer, the log-probability of every token.
        reference: log-probabilities under the reference model [answers].
        desirable: whether each answer is desirable.
    """
    from trl.trainer.kto_trainer import KTOTrainer

    inputs, model = _batch(answers)
    inputs["label"] = torch.tensor(desirable)
    inputs["ref_logps"] = reference

    (loss_type,) = config.loss_type
    trainer = _trainer(
        config,
        loss_type=loss_type,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        calculate_KL=False,
        _compute_kl_logps=lambda model, batch: None,
    )

    loss: Tensor = KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss


@contextmanager
def _in_float64() -> Iterator[None]:
    """Let TRL compute its constants in float64, too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _batch(answers: Sequence[Tensor]) -> tuple[dict[str, Tensor], Any]:
    """Return a padded batch of answers, and a model that gives them these log-probabilities.

    Each prompt has one token.
    """
    log_probs = pad_sequence(list(answers), batch_first=True)
    lengths = torch.tensor([len(answer) for answer in answers])
    positions = torch.arange(log_probs.shape[1] + 1)
    completion_mask = (positions > 0) & (positions <= lengths[:, None])
    inputs = {
        "input_ids": torch.ones_like(completion_mask, dtype=torch.int64),
        "attention_mask": positions <= lengths[:, None],
        "completion_mask": completion_mask.long(),
    }

    zeros = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    return inputs, lambda **_: outputs


def _trainer(config: PreferenceConfig, **settings: Any) -> Any:
    """Return the attributes that the loss of a trainer reads, for one process."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        beta=config.beta,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
