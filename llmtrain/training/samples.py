"""Texts that a model writes while it is trained: from the same prompts each time, so that one can see it learn."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.models.generation import Sampling, draw
from llmtrain.parallel.mesh import reshard


@torch.no_grad()
def sample(accelerator: Accelerator, model: nn.Module, tokenizer: Any, prompts: list[str], how: Sampling) -> list[str]:
    """Return how the model, as it stands, goes on from each prompt, or answers it where there is a chat template.

    All ranks call this and compute the same, for none may hold the full model. Torch's own generators stay as they are.
    """
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    was_training = plain.training
    plain.eval()
    texts = [_continued(plain, tokenizer, _ids_of(tokenizer, prompt), how, accelerator.device) for prompt in prompts]
    reshard(model)
    plain.train(was_training)
    return texts


def _ids_of(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids or [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]


def _continued(plain: Any, tokenizer: Any, ids: list[int], how: Sampling, device: torch.device) -> str:
    config: Any = getattr(plain, "config", None)
    limit = getattr(config, "block_size", None) or getattr(config, "max_position_embeddings", None) or 2**31
    generator = torch.Generator().manual_seed(how.seed)
    made: list[int] = []
    for _ in range(how.max_new_tokens):  # always as many: processes meet in each of these passes
        out = plain(input_ids=torch.tensor([[*ids, *made][-limit:]], device=device))
        made.append(draw(getattr(out, "logits", out)[0, -1].float().cpu(), how, generator))
    text = made[: made.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in made else made
    return str(tokenizer.decode(text, skip_special_tokens=True))
