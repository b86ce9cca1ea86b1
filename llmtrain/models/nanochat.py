"""A modern GPT to read in one sitting: parameter by parameter Hugging Face's ``NanoChatForCausalLM``.

Beside GPT-2's it has rotary positions (Su et al. 2021, arXiv:2104.09864), norms without weights (RMSNorm, Zhang and
Sennrich 2019, arXiv:1910.07467), normalised queries and keys (Henry et al. 2020, arXiv:2010.04245), ReLU squared (So et
al. 2021, arXiv:2109.08668), a head of its own, and no biases.

B rows, T positions, C = n_embd, H heads, D = C / H, V vocabulary.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmtrain.contract import Facts
from llmtrain.errors import require
from llmtrain.models.attention import causal_attention
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT, KeyedDropout, Stack, keys_at

_EPS, _THETA = 1e-6, 10_000.0
_INIT_STD, _HEAD_STD = 0.02, 0.001


def rms_norm(x: Tensor, *angles: Tensor) -> Tensor:
    """Return x divided by the root of the mean of its squares over the last dimension, taken in float32 or wider.

    With the ``angles`` of :func:`rotation` each pair of dimensions (i, i + D / 2) of heads x [B, H, T, D] is rotated
    before, with the published model's sign.
    """
    y: Tensor = _Normed.apply(x, *angles)  # type: ignore[no-untyped-call]
    return y


def rotation(positions: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D / 2], float32, of the angles by which the pairs of a head of ``size`` D turn."""
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] / _THETA ** (steps / size)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, sign: int, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    left = (first * cos).addcmul_(second, sin, value=sign)
    return torch.cat([left, (second * cos).addcmul_(first, sin, value=-sign)], dim=-1)


class _Normed(torch.autograd.Function):
    """RMSNorm of what may be rotated before. By itself autograd would keep, and pass over, four more tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *angles: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if angles:
            wide = _rotate(wide, 1, *angles)
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = (mean + _EPS).rsqrt()
        y: Tensor = wide * scale
        ctx.save_for_backward(y, scale, *angles)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        y, scale, *angles = ctx.saved_tensors
        wide = incoming.to(y.dtype)
        along = (wide * y).mean(dim=-1, keepdim=True)
        wide = torch.addcmul(wide, y, along, value=-1).mul_(scale)
        if angles:
            wide = _rotate(wide, -1, *angles)
        return wide.to(incoming.dtype), *(None for _ in angles)


class _ReluSquared(torch.autograd.Function):
    """max(x, 0) squared, which keeps one tensor, and takes two passes over it in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive: Tensor = F.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        gradient: Tensor = (incoming * positive).mul_(2)
        return gradient


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0) squared."""
    y: Tensor = _ReluSquared.apply(x)  # type: ignore[no-untyped-call]
    return y


class SelfAttention(nn.Module):
    """Causal self-attention with several heads, whose queries and keys are rotated and normalised."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        width = config.n_embd
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, C]
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in projected)  # [B, H, T, D]
        y = causal_attention(rms_norm(q, cos, sin), rms_norm(k, cos, sin), v)
        x = self.o_proj(y.transpose(1, 2).flatten(2))
        return x


class MLP(nn.Module):
    """Two projections with ReLU squared between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.fc2 = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc2(relu_squared(self.fc1(x)))
        return x


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = MLP(config)
        self.drop = KeyedDropout(config.dropout)

    def forward(self, x: Tensor, keys: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.self_attn(rms_norm(x), cos, sin), keys)
        x = x + self.drop(self.mlp(rms_norm(x)), keys_at(keys, 1))
        return x


class Model(Stack):
    """The embedding and the layers, with a norm after each end."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.n_embd)
        self.drop = KeyedDropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.head_size = config.n_embd // config.n_head

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # [B, T] -> [B, T, C]
        if self.held.start == 0:
            x = self.drop(rms_norm(self.embed_tokens(x)), keys)
        x = self.through(self.layers, x, keys, *rotation(x.shape[1], self.head_size, x.device))
        return rms_norm(x) if self.held.stop == len(self.layers) else x


class NanoChat(GPT):
    """Embedding, ``n_layer`` layers, and a head of its own.

    Published models of the kind cap their logits. That took a tenth of a small forward pass, and gained nothing.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding_rowwise",
        **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.fc1": "colwise",
        "model.layers.*.mlp.fc2": "rowwise",
        "lm_head": "head",
    }
    ends: ClassVar[dict[str, tuple[int, ...]]] = {"embed_tokens": (0,), "weight": (-1,)}

    def _build(self, config: GPTConfig, vocab_size: int) -> None:
        fits = config.n_embd // config.n_head % 2 == 0
        require(fits, f"--n_head {config.n_head}: a head has --n_embd / --n_head dimensions, which must be even.")
        self.model = Model(config, vocab_size)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)

    @property
    def body(self) -> Stack:
        return self.model

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    @property
    def embedded(self) -> int:
        return self.model.embed_tokens.weight.numel()

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which is not one of the hidden matrices."""
        return self.lm_head

    def deviation_of(self, name: str) -> float:
        """Return the deviation that a parameter is drawn with: 0 of what is added to the residual stream."""
        if name.endswith(("o_proj.weight", "fc2.weight")):
            return 0.0
        return _HEAD_STD if name == "lm_head.weight" else _INIT_STD

    def hf_config(self, end_of_text: int | None = None) -> Facts:
        """Return ``config.json`` of the stock ``nanochat`` model that computes the same."""
        c = self.config
        sizes = {"hidden_size": c.n_embd, "intermediate_size": 4 * c.n_embd, "num_hidden_layers": c.n_layer}
        sizes |= {"num_attention_heads": c.n_head, "num_key_value_heads": c.n_head}
        sizes |= {"max_position_embeddings": c.block_size, "vocab_size": self.vocab_size}
        # a padding token's row of the embedding would not be trained
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": None}
        kind: Facts = {"model_type": "nanochat", "architectures": ["NanoChatForCausalLM"], "hidden_act": "relu2"}
        kind |= {"rms_norm_eps": _EPS, "rope_parameters": {"rope_type": "default", "rope_theta": _THETA}}
        kind |= {"tie_word_embeddings": False, "initializer_range": _INIT_STD, "dtype": "float32"}
        return {**kind, "final_logit_softcapping": None, **sizes, **ends}
