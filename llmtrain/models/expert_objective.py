"""The objective of a mixture of experts: the nll of next tokens, plus the balancing loss."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from llmtrain.console import say
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.balancing_loss import (
    balancing_loss,
    count_choices,
    expert_weights,
    routed_positions,
    router_logits_of,
)
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import targets_of
from llmtrain.models.probe import example_tokens, probe_length, probe_output, trying


class ExpertObjective(Objective):
    """The mean nll per target token, plus the balancing loss over the global batch.

    The balancing loss changes the gradient, but not the value that is logged as the loss.

    Args:
        weight: the weight of the balancing loss. If it is 0, there is no counting pass.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        if "expert_weights" not in extra:
            return super().loss(model, batch, extra)

        with router_logits_of(model.base_model) as router_logits:
            nll = model.nll(**batch)
        is_routed = routed_positions(targets_of(batch["labels"]))
        balancing = balancing_loss(router_logits, is_routed, extra["expert_weights"])
        # The difference is zero, and has the gradient of the balancing loss.
        return LossSums(nll + (balancing - balancing.detach()), metrics={})

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        """Count how often each expert is chosen in the global batch."""
        if not self.weight:
            return {}
        counts = engine.sum_over_batches(count_choices_of_batch, batches)
        factors, loss = expert_weights(counts, totals.target_tokens, self.weight)
        return {"expert_weights": factors, "balance_loss": loss}

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        if "balance_loss" not in extra:
            return {}
        return {"balance_loss": float(extra["balance_loss"])}

    def check(self, model: CausalLM) -> None:
        """Turn the balancing loss off if the model's own class has none."""
        if not self.weight:
            return
        if not _has_balancing_loss(model):
            self.weight = 0.0
            say("experts", "this model class has no balancing loss")
            return
        say(
            "experts",
            f"the routers' balancing loss, times {self.weight:g}, is computed over the global "
            "batch, which takes one more forward pass per step",
        )


def count_choices_of_batch(model: CausalLM, batch: Batch) -> Tensor:
    """Run the layers on a micro-batch, and return the counts of :func:`count_choices`."""
    with router_logits_of(model.base_model) as router_logits:
        model.run_layers(**batch)
    is_routed = routed_positions(targets_of(batch["labels"]))
    experts_per_token = int(model.config.get_text_config().num_experts_per_tok)
    return count_choices(router_logits, is_routed, experts_per_token)


def _has_balancing_loss(model: CausalLM) -> bool:
    """Return whether the balancing loss of a model can be computed.

    Its own class must have such a loss, and its base must return router logits.
    """
    module = sys.modules[model.own_class.__module__]
    if not hasattr(module, "load_balancing_loss_func") or model.base_model is model:
        return False
    with trying(model), router_logits_of(model.base_model) as router_logits:
        probe_output(model, example_tokens(model, 1, probe_length(model)))
    return bool(router_logits)
