"""A modern GPT to read in one sitting: Hugging Face's ``Lfm2ForCausalLM`` in plain torch.

Parameters have the names and shapes of the stock class. Every other block has a gated convolution
over the last three positions instead of attention (LFM2, Liquid AI 2025, arXiv:2511.23404). The
other differences from GPT-2:

- RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467),
- normalised queries and keys (Henry et al. 2020, arXiv:2010.04245),
- rotary positions (Su et al. 2021, arXiv:2104.09864),
- SwiGLU (Shazeer 2020, arXiv:2002.05202),
- a head that is not the embedding's own matrix,
- no biases.

Shapes: B rows, T positions, C = n_embd, H heads, D = C / H, K = 3 taps of a filter, V vocabulary.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.models.attention import causal_attention
from llmtrain.models.config import GPTConfig
from llmtrain.models.documents import Documents, convolve
from llmtrain.models.gpt import GPT, KeyedDropout, Stack, keys_at
from llmtrain.models.loss import matmul_dtype

_EPS = 1e-5
_THETA = 10_000.0
_TAPS = 3

_INIT_STD = 0.02
# Standard deviations of the initial weights of modules that do not use _INIT_STD.
_SPECIAL_INIT_STDS = {"embed_tokens": 0.1, "conv": 0.5}


def rotation(positions: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles of rotary positions.

    Args:
        positions: how many positions there are, T.
        size: the size of a head, D.
        device: where the result is needed.

    Returns:
        Two float32 tensors [T, 1, D / 2], with an angle for each pair of dimensions.
    """
    steps = torch.arange(0, size, 2, device=device, dtype=torch.float32)
    indices = torch.arange(positions, device=device, dtype=torch.float32)
    angles = indices[:, None] / _THETA ** (steps / size)
    return angles.cos()[:, None], angles.sin()[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dimensions (i, i + D / 2) of x [B, T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    new_first = torch.addcmul(first * cos, second, sin, value=-1)
    new_second = torch.addcmul(second * cos, first, sin)
    return torch.cat([new_first, new_second], dim=-1)


class Norm(nn.Module):
    """RMSNorm over the last dimension, computed in float32 or wider.

    If ``forward`` gets the cosines and sines of :func:`rotation`, it also rotates heads
    [B, T, H, D]. The result has the dtype of the matrix products that take it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # On a CPU this takes less time than the mean of squares, and than torch's RMSNorm.
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        y: Tensor = wide * (mean_square + _EPS).rsqrt() * self.weight
        if angles:
            y = _rotate(y, *angles)
        return y.to(matmul_dtype(x.device, x.dtype))


class ShortConv(nn.Module):
    """A causal convolution of each channel over the last three positions, between two gates."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        # This module is never called. It gives its weight the name that it has in the stock class.
        self.conv = nn.Conv1d(width, width, _TAPS, groups=width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, documents: Documents | None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        x = self.in_proj(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        gate_before, gate_after, values = wide.chunk(3, dim=-1)
        y = convolve(
            gate_before * values,
            weight=self.conv.weight.flatten(1),
            documents=documents or Documents(),
        )
        x = self.out_proj((gate_after * y).to(x.dtype))
        return x


class SelfAttention(nn.Module):
    """Causal multi-head self-attention with normalised and rotated queries and keys."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.head_size = config.n_embd // config.n_head
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.q_layernorm = Norm(self.head_size)
        self.k_layernorm = Norm(self.head_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        heads = (*x.shape[:2], -1, self.head_size)  # [B, T, H, D]
        q = self.q_proj(x).view(heads)
        k = self.k_proj(x).view(heads)
        v = self.v_proj(x).view(heads)
        q = self.q_layernorm(q, cos, sin)
        k = self.k_layernorm(k, cos, sin)

        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        x = self.out_proj(y.transpose(1, 2).flatten(2))
        return x


class MLP(nn.Module):
    """SwiGLU: a projection, gated by the SiLU of another, and a projection back.

    It has about as many weights as GPT-2's MLP.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        inner = inner_size(config)
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return x


def inner_size(config: GPTConfig) -> int:
    """Return the inner width of an MLP: about 8 / 3 of ``n_embd``.

    It is the nearest multiple of 32, for even matrix products.
    """
    return 32 * max(round(config.n_embd / 12), 1)


class Layer(nn.Module):
    """Attention or a short convolution, then an MLP, each normalised and added to the residual."""

    def __init__(self, config: GPTConfig, has_attention: bool) -> None:
        super().__init__()
        self.has_attention = has_attention
        if has_attention:
            self.self_attn = SelfAttention(config)
        else:
            self.conv = ShortConv(config)
        self.feed_forward = MLP(config)
        self.operator_norm = Norm(config.n_embd)
        self.ffn_norm = Norm(config.n_embd)
        self.drop = KeyedDropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        normed = self.operator_norm(x)
        if self.has_attention:
            mixed = self.self_attn(normed, cos, sin, documents)
        else:
            mixed = self.conv(normed, documents)
        x = x + self.drop(mixed, keys)
        x = x + self.drop(self.feed_forward(self.ffn_norm(x)), keys_at(keys, 1))
        return x


class Model(Stack):
    """The embedding, the layers and the last norm."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.n_embd)
        self.drop = KeyedDropout(config.dropout)
        self.layers = nn.ModuleList(
            Layer(config, has_attention=index in attention_layers(config))
            for index in range(config.n_layer)
        )
        self.embedding_norm = Norm(config.n_embd)
        self.head_size = config.n_embd // config.n_head

    def forward(self, x: Tensor, keys: Tensor | None, documents: Documents | None = None) -> Tensor:
        """[B, T] -> [B, T, C]."""
        x = self.drop(self.embed_tokens(x), keys)

        # Attention depends on distances alone, so these positions need not restart at documents.
        cos, sin = rotation(x.shape[1], self.head_size, x.device)
        x = self.run_blocks(self.layers, x, keys, cos, sin, documents)

        x = self.embedding_norm(x)
        return x


def attention_layers(config: GPTConfig) -> set[int]:
    """Return the indices of the layers with attention: every other one, and the last."""
    return {*range(1, config.n_layer, 2), config.n_layer - 1}


class LFM2(GPT):
    """An embedding, ``n_layer`` layers of two kinds, and a head with its own matrix."""

    attention_class: ClassVar[type[nn.Module]] = SelfAttention

    def _build(self, config: GPTConfig, vocab_size: int) -> None:
        head_size = config.n_embd // config.n_head
        if head_size % 2:
            raise UserError(
                f"--n_head {config.n_head} gives each head --n_embd / --n_head = {head_size} "
                "dimensions, which must be even; use another --n_head."
            )
        self.model = Model(config, vocab_size)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)

    @property
    def base_model(self) -> Stack:
        return self.model

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the head. Optimizers and sharding treat it unlike the matrices of the layers."""
        return self.lm_head

    def init_std(self, name: str) -> float:
        """Return the standard deviation of a parameter's initial weights.

        It is 0 for projections whose output is added to the residual stream.
        """
        if name.endswith(("out_proj.weight", "w2.weight")):
            return 0.0
        module_name = name.split(".")[-2]
        return _SPECIAL_INIT_STDS.get(module_name, _INIT_STD)

    def hf_config(self, end_of_text: int | None = None) -> JsonObject:
        """Return ``config.json`` of the stock ``lfm2`` model that computes the same."""
        config = self.config
        layer_types = []
        for index in range(config.n_layer):
            has_attention = index in attention_layers(config)
            layer_types.append("full_attention" if has_attention else "conv")

        return {
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "layer_types": layer_types,
            "norm_eps": _EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": _THETA},
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "initializer_range": _INIT_STD,
            "dtype": "float32",
            "hidden_size": config.n_embd,
            "intermediate_size": inner_size(config),
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.n_head,
            "conv_L_cache": _TAPS,
            "max_position_embeddings": config.block_size,
            "vocab_size": self.vocab_size,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            # transformers would not train the embedding of a padding token.
            "pad_token_id": None,
        }


_ARCHITECTURES: dict[str, type[GPT]] = {"gpt2": GPT, "lfm2": LFM2}


def build_gpt(config: GPTConfig, vocab_size: int, seed: int = 0) -> GPT:
    """Return the model that ``config.architecture`` names.

    Args:
        config: the architecture and its sizes.
        vocab_size: the number of tokens that the model knows.
        seed: of the initial weights. On the meta device they are not initialised yet.
    """
    return _ARCHITECTURES[config.architecture](config, vocab_size, seed)
