"""The optimizers that ``--optim`` names. A new one is a row of :data:`OPTIMIZERS`."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.console import note
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.models.gpt import Projection
from llmtrain.parallel.ranks import TrainingAccelerator, ranks_of
from llmtrain.training.adamw import (
    CompactAdamW,
    EightBitAdamW,
    needs_compensation,
)
from llmtrain.training.muon import Muon
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import can_skip_on_device, skipped_on_device


class OptimizerKind(NamedTuple):
    """What the package knows of an optimizer that ``--optim`` names.

    Attributes:
        make: makes it, given parameter groups and the keywords ``lr``, ``betas`` and ``eps``.
        initial_state: returns the state of a parameter before its first step. On the meta device,
            this is how much memory the state needs.
        has_muon: whether Muon trains the hidden matrices, and ``make`` is for the rest.
        has_chunks: whether a step copies float32 weights, in chunks of
            :data:`~llmtrain.training.adamw.CHUNK_NUMEL`. With weights in bfloat16 each one does.
    """

    make: Callable[..., torch.optim.Optimizer]
    initial_state: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    has_muon: bool = False
    has_chunks: bool = False


def _adamw(groups: list[JsonObject], **settings: Any) -> torch.optim.Optimizer:
    """Return AdamW, which is torch's own if all weights are float32."""
    if any(needs_compensation(p) for group in groups for p in group["params"]):
        return CompactAdamW(groups, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


# The choices and the help of `--optim` are in OptimConfig, so that `--help` imports no torch.
OPTIMIZERS = {
    "adamw": OptimizerKind(
        make=_adamw,
        initial_state=CompactAdamW.initial_state,
    ),
    "adamw_torch_8bit": OptimizerKind(
        make=EightBitAdamW,
        initial_state=EightBitAdamW.initial_state,
        has_chunks=True,
    ),
    "muon": OptimizerKind(
        make=_adamw,
        initial_state=CompactAdamW.initial_state,
        has_muon=True,
    ),
}


def make_optimizer(
    accelerator: Accelerator, model: nn.Module, config: OptimConfig
) -> torch.optim.Optimizer:
    """Make the optimizer that ``--optim`` names, over the parameters that are trained.

    AdamW (Loshchilov & Hutter 2019) applies weight decay to matrices; see
    :func:`decayed_parameters`. With ``--optim muon``, Muon takes the hidden matrices, and AdamW the
    rest. Muon computes in bfloat16 if that is the accelerator's mixed precision.

    """
    kind = OPTIMIZERS[config.optim]
    trained = [p for p in model.parameters() if p.requires_grad]
    for_muon = hidden_matrices(model) if kind.has_muon else []
    muon_ids = {id(p) for p in for_muon}
    others = [p for p in trained if id(p) not in muon_ids]
    decayed_ids = {id(p) for _, p in decayed_parameters(model)}
    groups = [
        {
            "params": [p for p in others if id(p) in decayed_ids],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in others if id(p) not in decayed_ids], "weight_decay": 0.0},
    ]
    optimizer = kind.make(
        groups,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
    )
    if not for_muon:
        return optimizer

    # With --bitwise, ranks do not divide Muon's work, because the division depends on the layout.
    divides_work = isinstance(accelerator, TrainingAccelerator) and not accelerator.bitwise
    muon = Muon(
        for_muon,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.adam_beta1,
        dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        ranks=ranks_of(accelerator) if divides_work else None,
    )
    return MuonWithAdamW(muon, optimizer)


def is_made_by_flag(optimizer: torch.optim.Optimizer, name: str, model: nn.Module) -> bool:
    """Return whether an optimizer is of the kind that ``--optim`` names.

    For a model without hidden matrices, such as one whose adapters are all in the embedding, Muon
    has nothing to do, and AdamW is of its kind.
    """
    if OPTIMIZERS[name].has_muon and not hidden_matrices(model):
        name = "adamw"
    kind = None
    if isinstance(optimizer, MuonWithAdamW):
        kind = "muon"
    elif isinstance(optimizer, EightBitAdamW):
        kind = "adamw_torch_8bit"
    elif isinstance(optimizer, torch.optim.AdamW | CompactAdamW):
        kind = "adamw"
    return kind == name


def check_optimizer_flags(
    config: OptimConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: object = None,
) -> None:
    """Check that every flag of the optimizer that the user set has an effect.

    A recipe may bring an optimizer or a schedule of its own, and leave such a flag unread. Flags
    are compared with the optimizer, however it was made.

    Args:
        config: the flags.
        model: the model, without wrappers.
        optimizer: the optimizer, before ``accelerator.prepare``.
        schedule: the recipe's own schedule, if it has one.

    Raises:
        UserError: if a flag has no effect.
    """
    unread: list[str] = []
    if config.is_set("optim") and not is_made_by_flag(optimizer, config.optim, model):
        unread.append(f"--optim {config.optim} (the recipe makes {type(optimizer).__name__})")

    values_of_flag = {
        "weight_decay": _values(optimizer, "weight_decay"),
        "adam_beta1": _values(optimizer, "betas", 0) + _values(optimizer, "momentum"),
        "adam_beta2": _values(optimizer, "betas", 1),
        "adam_epsilon": _values(optimizer, "eps"),
    }
    for name, values in values_of_flag.items():
        value = getattr(config, name)
        if config.is_set(name) and value not in values:
            unread.append(f"--{name} {value:g} (no parameter group has this value)")

    trained = [p for group in optimizer.param_groups for p in group["params"]]
    has_bf16_weights = any(p.dtype == torch.bfloat16 for p in trained)
    if config.trained_dtype == "bfloat16" and not has_bf16_weights:
        unread.append("--dtype bfloat16 (the recipe trains other weights)")
    if has_bf16_weights and not getattr(optimizer, "keeps_small_updates", False):
        note(
            f"the recipe's own {type(optimizer).__name__} may lose small updates of weights in "
            "bfloat16"
        )

    if schedule is not None:
        for name in ("lr_scheduler_type", "warmup_steps", "min_lr", "decay_share"):
            if config.is_set(name):
                unread.append(f"--{name} (the recipe has its own schedule)")

    if unread:
        raise UserError(f"flags without effect: {', '.join(unread)}; leave them out.")


def _values(optimizer: torch.optim.Optimizer, key: str, index: int | None = None) -> list[object]:
    """Return the values of all parameter groups under a key, or those at an index of a tuple."""
    values = [group[key] for group in optimizer.param_groups if group.get(key) is not None]
    if index is None:
        return values
    sequences = [value for value in values if isinstance(value, list | tuple)]
    return [value[index] for value in sequences if index < len(value)]


# What transformers' Trainer excludes from weight decay by its name, in lower case
# (Trainer.get_decay_parameter_names, transformers 5.23).
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


def decayed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield the trained parameters that decay, each with the module that it belongs to.

    They are the matrices and larger tensors that transformers' Trainer lets decay, without the
    weights of norms that have another name, and without the ``A_log`` of state space models, whose
    authors do not let it decay. A table with biases for several experts is no matrix.
    """
    for name, p in model.named_parameters():
        module_name, _, own_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        # Some embeddings are called normed embeddings.
        is_norm = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)
        is_excluded = is_norm or own_name == "A_log" or _WITHOUT_DECAY.search(name.lower())
        if p.requires_grad and p.dim() >= 2 and not is_excluded:
            yield module, p


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear layers that are trained and decay, without those of the head.

    The head predicts tokens, or is the ``score`` head of a reward model. Other matrices, such as
    the stacked weights of experts, are no products with one input, so Muon leaves them alone.
    """
    from transformers.pytorch_utils import Conv1D

    heads = [getattr(model, "score", None)]  # transformers' name for a sequence-classification head
    get_output_embeddings = getattr(model, "get_output_embeddings", None)
    if get_output_embeddings is not None:
        heads.append(get_output_embeddings())  # None for sequence classification
    head_ids: set[int] = set()
    for head in heads:
        if isinstance(head, nn.Module):
            head_ids.update(id(p) for p in head.parameters())
    return [
        p
        for module, p in decayed_parameters(model)
        if isinstance(module, nn.Linear | Conv1D | Projection) and id(p) not in head_ids
    ]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the rest, as a single optimizer.

    Its parameter groups are Muon's, then AdamW's. Each keeps the settings that it has.
    """

    keeps_small_updates = True

    def __init__(self, muon: Muon, adamw: torch.optim.Optimizer) -> None:
        self.optimizers = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share_state()

    @property
    def skips_on_device(self) -> bool:
        """Whether both can skip a step on the device."""
        return all(can_skip_on_device(optimizer) for optimizer in self.optimizers)

    def _share_state(self) -> None:
        """Let both work on this optimizer's groups and state."""
        muon, adamw = self.optimizers
        muon_count = len(muon.param_groups)
        muon.param_groups = self.param_groups[:muon_count]
        adamw.param_groups = self.param_groups[muon_count:]
        muon.state = self.state
        adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace groups and state; ``load_state_dict`` calls this."""
        super().__setstate__(state)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            with skipped_on_device(optimizer, getattr(self, "found_inf", None)):
                optimizer.step()
