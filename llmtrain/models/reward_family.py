"""Which families of models can be reward models."""

from typing import TYPE_CHECKING

from llmtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_OTHER_FAMILY = (
    "use a model of another family, such as llama, qwen3 or gpt2 "
    "(recipes/gpt.py --architecture gpt2)"
)


def check_reward_family(config_class: "type[PreTrainedConfig]") -> None:
    """Check that transformers has a class for sequence classification in a family.

    Args:
        config_class: the class of the family's configurations.

    Raises:
        UserError: if it has none.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if config_class not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            "--loss_type reward: transformers has no sequence classification class for "
            f"{config_class.model_type}; {_OTHER_FAMILY}."
        )


def check_score_head(model: "PreTrainedModel") -> None:
    """Check that a model for sequence classification scores every token.

    Args:
        model: the model.

    Raises:
        UserError: if its head is not one matrix product named ``score``.
    """
    if not hasattr(model, "score"):
        raise UserError(
            f"--loss_type reward: {type(model).__name__} has no head named score; {_OTHER_FAMILY}."
        )
