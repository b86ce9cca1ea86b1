"""The flags of a preference loss: which losses are added, and whether they fit together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmtrain.config.flags import flags_of
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.preference import LossParameters, PreferenceLoss
from llmtrain.models.preference_losses import PREFERENCE_LOSSES
from llmtrain.models.reward_family import check_reward_family


@dataclass
class PreferenceConfig(LossParameters):
    """The loss that compares answers, or a weighted sum of several. Each field is a flag.

    A subclass adds losses of its own to the table ``losses``, and their parameters as fields.

    Attributes:
        losses: every loss by its name in ``--loss_type``.
    """

    losses: ClassVar[Mapping[str, PreferenceLoss]] = PREFERENCE_LOSSES

    def __post_init__(self) -> None:
        self._check_losses()
        if not 0 < self.beta < float("inf"):
            raise UserError(f"--beta {self.beta} is out of range: it must be above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(
                f"--label_smoothing {self.label_smoothing} is out of range: it must be at least 0 "
                "and below 0.5."
            )
        for name in ("desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UserError(f"--{name} {value} is out of range: it must be above 0.")
        self._check_parameters()

    def _check_losses(self) -> None:
        """Raise :class:`UserError` for unknown losses, or for losses that cannot be added."""
        if not self.loss_type:
            raise UserError("--loss_type is empty: name a loss, such as sigmoid.")
        for name in self.loss_type:
            if name not in self.losses:
                raise UserError(
                    f"--loss_type {name} does not exist; use one of {', '.join(self.losses)}."
                )

        if self.loss_weights and len(self.loss_weights) != len(self.loss_type):
            raise UserError(
                f"--loss_weights has {len(self.loss_weights)} values and --loss_type "
                f"{len(self.loss_type)}; give one weight for each loss."
            )
        for weight in self.loss_weights:
            if not 0 < weight < float("inf"):
                raise UserError(f"--loss_weights {weight} is out of range: it must be above 0.")

        if len({loss.is_unpaired for loss in self.selected_losses}) > 1:
            raise UserError(
                f"{self.loss_flags} adds losses of pairs to losses of single answers; use losses "
                "of one kind."
            )
        if self.is_reward_model and len(self.loss_type) > 1:
            raise UserError(
                f"{self.loss_flags} trains a reward model, which has no log-probabilities for "
                "another loss; leave the others out."
            )

    def _check_parameters(self) -> None:
        """Raise :class:`UserError` if a parameter is set that no selected loss uses."""
        users: dict[str, list[str]] = {}
        for name, loss in self.losses.items():
            for parameter in loss.parameters:
                users.setdefault(parameter, []).append(name)

        fields = flags_of(self)
        for parameter, names in users.items():
            is_set = getattr(self, parameter) != fields[parameter].default
            if is_set and not set(names) & set(self.loss_type):
                raise UserError(
                    f"--{parameter} is for --loss_type {', '.join(names)}; leave it out."
                )

    def choices(self, name: str) -> tuple[str, ...]:
        return tuple(self.losses) if name == "loss_type" else ()

    @property
    def selected_losses(self) -> list[PreferenceLoss]:
        """The losses in ``loss_type``. The rewards in the metrics are those of the first."""
        return [self.losses[name] for name in self.loss_type]

    @property
    def weights(self) -> list[float]:
        """The weight of each selected loss in their sum."""
        return self.loss_weights or [1.0] * len(self.loss_type)

    @property
    def loss_flags(self) -> str:
        """The selected losses, as the user writes them."""
        flags = f"--loss_type {' '.join(self.loss_type)}"
        if self.loss_weights:
            flags += f" --loss_weights {' '.join(map(str, self.loss_weights))}"
        return flags

    @property
    def loss_name(self) -> str:
        """The name of the loss in the literature, and its flags."""
        titles = [loss.title for loss in self.selected_losses]
        return f"{' + '.join(titles)} (`{self.loss_flags}`)"

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss takes single answers instead of pairs."""
        return any(loss.is_unpaired for loss in self.selected_losses)

    @property
    def uses_reference(self) -> bool:
        """Whether the loss takes log-probabilities of the reference model.

        The reference model is the model with its initial weights.
        """
        return any(loss.uses_reference for loss in self.selected_losses)

    @property
    def is_reward_model(self) -> bool:
        """Whether the loss trains a reward model."""
        return any(loss.is_reward_model for loss in self.selected_losses)

    def needs_statistic(self, name: str) -> bool:
        """Return whether the loss needs a number of the global batch; see PreferenceLoss."""
        return any(name in loss.statistics for loss in self.selected_losses)

    def default_learning_rate(self, has_adapter: bool) -> float:
        """Return the default learning rate of this loss.

        Args:
            has_adapter: whether a LoRA adapter is trained, which needs a higher rate.
        """
        if has_adapter:
            return 1e-5
        return max(loss.learning_rate for loss in self.selected_losses)

    def check_family(self, model: ModelConfig) -> None:
        """Check that the loss can train this model's family. It needs no data.

        Args:
            model: which model. If it was an adapter, it has been merged into its base.

        Raises:
            UserError: if the loss trains a reward model, and the family has no class for it.
        """
        if not self.is_reward_model:
            return
        model_config = model.known_configuration()
        if model_config is not None:
            check_reward_family(type(model_config))
