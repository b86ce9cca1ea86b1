"""Where the weights of a model on the meta device come from."""

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from llmtrain.interfaces.model_bundle import Weights
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hub_models import local_folder
from llmtrain.models.lora import with_adapter_weights
from llmtrain.models.weight_loading import load_buffers, random_weights, stored_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class InitialWeights:
    """The initial weights of a model on the meta device: stored ones, or random ones.

    The stored buffers of the model, which are small, are loaded at once.

    This remembers the model as it was built. Later it may get new embeddings, and LoRA renames
    parameters of the layers that it wraps.

    Args:
        model: the model, before any change.
        config: which weights.
        dtype: of stored weights.
        seed: of random weights.
        is_reward_model: its head is not stored anywhere, so it is initialised from the seed.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        config: ModelConfig,
        dtype: torch.dtype,
        seed: int,
        is_reward_model: bool,
    ) -> None:
        name = config.model_name_or_path
        if name is not None:
            load_buffers(model.train(False), local_folder(name, config.model_revision))
        self._original = copy.deepcopy(model)
        self._original_names = {parameter: key for key, parameter in model.named_parameters()}
        self._folder = local_folder(name, config.model_revision) if name else None
        self._dtype = dtype
        self._seed = seed
        self._is_reward_model = is_reward_model

    def load_embeddings(self, model: "PreTrainedModel") -> None:
        """Load the input and output embeddings of a model.

        The embeddings of new tokens are made from those of the other tokens.
        """
        input_embeddings = self._original.get_input_embeddings()
        output_embeddings = self._original.get_output_embeddings()  # type: ignore[no-untyped-call]
        modules = [input_embeddings]
        if output_embeddings is not None:
            modules.append(output_embeddings)

        for key, weight in self._weights(modules):
            module_name, _, parameter_name = key.rpartition(".")
            # A clone, because `weight` may be mapped from a file that changes during the run.
            parameter = nn.Parameter(weight.clone())
            setattr(model.get_submodule(module_name), parameter_name, parameter)
        model.tie_weights()

    def for_parameters_of(self, trained: CausalLM) -> Weights:
        """Return the initial weights of the parameters that are still on the meta device.

        Args:
            trained: the model after all changes. The weights have its parameters' names.
        """
        new_names = {
            self._original_names[parameter]: key
            for key, parameter in trained.named_parameters()
            if parameter.is_meta and parameter in self._original_names
        }
        renamed = ((new_names[key], weight) for key, weight in self._weights() if key in new_names)
        return with_adapter_weights(trained, renamed)

    def _weights(self, modules: Collection[nn.Module] = ()) -> Weights:
        """Return the weights of the original model, or of some of its modules."""
        if self._folder is None:
            return random_weights(self._original, self._seed, modules)
        return stored_weights(
            self._original,
            self._folder,
            self._dtype,
            modules,
            head_seed=self._seed if self._is_reward_model else None,
        )
