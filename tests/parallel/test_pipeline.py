import pytest
from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.pipeline import PipelinedEngine
from llmtrain.types import Objective


class _Distillation(Objective):
    """An objective that needs the logits, which only the last stage has."""


def test_a_pipeline_refuses_an_objective_of_the_users_own(accelerator: Accelerator) -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=8), 30)
    with pytest.raises(UserError, match="_Distillation cannot be computed by a pipeline"):
        PipelinedEngine(accelerator, model, objective=_Distillation())
