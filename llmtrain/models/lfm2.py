"""A modern GPT to read in one sitting: parameter by parameter Hugging Face's ``Lfm2ForCausalLM``.

Every other block has a gated convolution over the last three positions in place of attention (LFM2, Liquid AI 2025,
arXiv:2511.23404). What differs from GPT-2 beside that: RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), normalised
queries and keys (Henry et al. 2020, arXiv:2010.04245), rotary positions (Su et al. 2021, arXiv:2104.09864), SwiGLU
(Shazeer 2020, arXiv:2002.05202), a head that is not the embedding, and no biases.

B rows, T positions, C = n_embd, H heads, D = C / H, K = 3 taps of a filter, V vocabulary.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from llmtrain.errors import UserError
from llmtrain.models.attention import causal_attention
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT, KeyedDropout, Stack, keys_at
from llmtrain.parallel.shards import to_local
from llmtrain.types import Facts

_EPS, _THETA, _TAPS = 1e-5, 10_000.0, 3
_INIT_STD = 0.02
_STDS = {"embed_tokens": 0.1, "conv": 0.5}  # of modules that are drawn otherwise


def rotation(positions: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, D / 2], float32, of the angles by which the pairs of a head of size D turn."""
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] / _THETA ** (
        steps / size
    )
    return angles.cos()[:, None], angles.sin()[:, None]


def _rotate(x: Tensor, sign: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + D / 2) of x [B, T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    left = (first * cos).addcmul_(second, sin, value=-sign)
    return torch.cat([left, (second * cos).addcmul_(first, sin, value=sign)], dim=-1)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype of the matrix product that takes x: autocast's, or its own."""
    device, exact = x.device.type, x.dtype == torch.float64
    return (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device) and not exact
        else x.dtype
    )


class _Normed(torch.autograd.Function):
    """RMSNorm times a weight, rotated where there are angles. Autograd would keep, and pass over, six more tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *angles: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = (mean + _EPS).rsqrt()
        ctx.save_for_backward(wide, scale, weight, *angles)
        ctx.dtype = x.dtype
        y = (wide * scale).mul_(weight)
        return (_rotate(y, 1, *angles) if angles else y).to(_dtype_of_products(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        wide, scale, weight, *angles = ctx.saved_tensors
        incoming = incoming.to(wide.dtype)
        if angles:
            incoming = _rotate(incoming, -1, *angles)
        # LayerNorm's, in one pass, of a mean that is zero; it subtracts the mean of the gradient, which is put back
        sizes, zero = [len(weight)], torch.zeros_like(scale)
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            incoming, wide, sizes, zero, scale, weight, None, [True, True, False]
        )
        of_x += (incoming @ (weight / len(weight)))[..., None] * scale
        return of_x.to(ctx.dtype), of_weight.to(weight.dtype), *(None for _ in angles)


class _Gated(torch.autograd.Function):
    """A causal convolution between two gates. It keeps its input alone, and computes in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        before, after, values = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(3, dim=-1)
        return (after * _filtered(before * values, taps)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        before, after, values = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(3, dim=-1)
        gated, wide = before * values, incoming.to(before.dtype)
        of_after, wide = wide * _filtered(gated, taps), wide * after
        of_gated, of_taps = torch.zeros_like(gated), torch.empty_like(taps, dtype=gated.dtype)
        for tap, of_tap, (now, then) in zip(taps.T, of_taps.T, _shifts(x, taps), strict=True):
            of_tap.copy_((wide[:, now] * gated[:, then]).flatten(0, 1).sum(0))
            of_gated[:, then].addcmul_(wide[:, now], tap)
        return torch.cat([of_gated * values, of_after, of_gated * before], dim=-1).to(
            x.dtype
        ), of_taps.to(taps.dtype)


def _filtered(x: Tensor, taps: Tensor) -> Tensor:
    """Return at each position of x [B, T, C] the sum of the last K, each times the tap [C, K] of its channel."""
    y = torch.zeros_like(x)
    for tap, (now, then) in zip(taps.T, _shifts(x, taps), strict=True):
        y[:, now].addcmul_(x[:, then], tap)
    return y


def _shifts(x: Tensor, taps: Tensor) -> list[tuple[slice, slice]]:
    """Return for each tap the positions that it adds to, and the earlier ones that it multiplies."""
    (_, length, _), (_, count) = x.shape, taps.shape
    return [(slice(back, None), slice(max(length - back, 0))) for back in reversed(range(count))]


class Norm(nn.Module):
    """RMSNorm over the last dimension. With the ``angles`` of :func:`rotation` heads [B, T, H, D] are rotated after.

    The result has the dtype of the matrix products that take it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        y: Tensor = _Normed.apply(x, self.weight, *angles)  # type: ignore[no-untyped-call]
        return y


class ShortConv(nn.Module):
    """A causal convolution of each channel over the last three positions, gated before and after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Conv1d(
            width, width, _TAPS, groups=width, bias=False
        )  # never called: it holds the weight
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        x = self.in_proj(x)
        taps = to_local(self.conv.weight).flatten(1).to(x.dtype)
        x = self.out_proj(_Gated.apply(x, taps))  # type: ignore[no-untyped-call]
        return x


class SelfAttention(nn.Module):
    """Causal self-attention with several heads, whose queries and keys are normalised and rotated."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.head_size = config.n_embd, config.n_embd // config.n_head
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.q_layernorm, self.k_layernorm = Norm(self.head_size), Norm(self.head_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, C]
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_size)) for y in projected)  # [B, T, H, D]
        q, k = self.q_layernorm(q, cos, sin), self.k_layernorm(k, cos, sin)
        y = causal_attention(*(each.transpose(1, 2) for each in (q, k, v)))
        x = self.out_proj(y.transpose(1, 2).flatten(2))
        return x


class MLP(nn.Module):
    """SwiGLU: a projection, gated by the SiLU of another, and one back. It has as many weights as GPT-2's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, inner = config.n_embd, inner_size(config)
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return x


def inner_size(config: GPTConfig) -> int:
    """Return the width of an MLP: the multiple of 32 nearest to 8 / 3 of ``n_embd``, for even matrix products."""
    return 32 * max(round(config.n_embd / 12), 1)


class Layer(nn.Module):
    """Attention or a short convolution, and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        if attends:
            self.self_attn = SelfAttention(config)
        else:
            self.conv = ShortConv(config)
        self.feed_forward = MLP(config)
        self.operator_norm, self.ffn_norm = Norm(config.n_embd), Norm(config.n_embd)
        self.drop = KeyedDropout(config.dropout)

    def forward(self, x: Tensor, keys: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.operator_norm(x)
        x = x + self.drop(self.self_attn(y, cos, sin) if self.attends else self.conv(y), keys)
        x = x + self.drop(self.feed_forward(self.ffn_norm(x)), keys_at(keys, 1))
        return x


class Model(Stack):
    """The embedding, the layers and the last norm."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.n_embd)
        self.drop = KeyedDropout(config.dropout)
        self.layers = nn.ModuleList(
            Layer(config, index in attending_layers(config)) for index in range(config.n_layer)
        )
        self.embedding_norm = Norm(config.n_embd)
        self.head_size = config.n_embd // config.n_head

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # [B, T] -> [B, T, C]
        if self.held.start == 0:
            x = self.drop(self.embed_tokens(x), keys)
        x = self.through(self.layers, x, keys, *rotation(x.shape[1], self.head_size, x.device))
        return self.embedding_norm(x) if self.held.stop == len(self.layers) else x


def attending_layers(config: GPTConfig) -> set[int]:
    """Return the layers that attend: every other, and the last."""
    return {*range(1, config.n_layer, 2), config.n_layer - 1}


class LFM2(GPT):
    """Embedding, ``n_layer`` layers of two kinds, and a head of its own."""

    tp_plan: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.conv.in_proj": "colwise_of_3",
        "model.layers.*.conv.conv": "by_itself",
        "model.layers.*.conv.out_proj": "rowwise",
        **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), "colwise"),
        "model.layers.*.self_attn.q_layernorm": "replicated_with_grad_allreduce",
        "model.layers.*.self_attn.k_layernorm": "replicated_with_grad_allreduce",
        "model.layers.*.self_attn.out_proj": "rowwise",
        **dict.fromkeys(
            (f"model.layers.*.feed_forward.{name}" for name in ("w1", "w3")), "colwise"
        ),
        "model.layers.*.feed_forward.w2": "rowwise",
        "lm_head": "by_itself",
    }
    ends: ClassVar[dict[str, tuple[int, ...]]] = {
        "embed_tokens": (0,),
        "embedding_norm": (-1,),
        "weight": (-1,),
    }

    def _build(self, config: GPTConfig, vocab_size: int) -> None:
        head_size = config.n_embd // config.n_head
        if head_size % 2:
            raise UserError(
                f"--n_head {config.n_head} gives each head --n_embd / --n_head = {head_size} dimensions, which must be "
                "even; use another --n_head."
            )
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

    @property
    def attending(self) -> int:
        return len(attending_layers(self.config))

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which is not one of the hidden matrices."""
        return self.lm_head

    def deviation_of(self, name: str) -> float:
        """Return the deviation that a parameter is drawn with: 0 of what is added to the residual stream."""
        if name.endswith(("out_proj.weight", "w2.weight")):
            return 0.0
        return _STDS.get(name.split(".")[-2], _INIT_STD)

    def hf_config(self, end_of_text: int | None = None) -> Facts:
        """Return ``config.json`` of the stock ``lfm2`` model that computes the same."""
        c = self.config
        kinds = [
            "full_attention" if index in attending_layers(c) else "conv"
            for index in range(c.n_layer)
        ]
        sizes = {
            "hidden_size": c.n_embd,
            "intermediate_size": inner_size(c),
            "num_hidden_layers": c.n_layer,
        }
        sizes |= {
            "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_head,
            "conv_L_cache": _TAPS,
        }
        sizes |= {"max_position_embeddings": c.block_size, "vocab_size": self.vocab_size}
        # a padding token's row of the embedding would not be trained
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": None}
        kind: Facts = {
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "layer_types": kinds,
        }
        kind |= {
            "norm_eps": _EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
        }
        kind |= {
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        }
        return {**kind, "initializer_range": _INIT_STD, "dtype": "float32", **sizes, **ends}
