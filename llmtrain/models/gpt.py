"""A GPT-2 to read in one sitting: GPT-2's parameter names and shapes, and nothing else of its history.

B rows, T positions, C = n_embd, H heads, V vocabulary. The state dict of this module is that of Hugging Face's
``GPT2LMHeadModel`` without the tied head, name by name and shape by shape.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.errors import UserError
from llmtrain.models.attention import causal_attention
from llmtrain.models.config import GPTConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.loss import inputs_of, linear_logits, linear_nll, targets_of
from llmtrain.models.trainable import TrainableModel
from llmtrain.parallel.shards import fill
from llmtrain.types import Facts, ModelBundle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_INIT_STD = 0.02


class Projection(nn.Module):
    """A linear layer x @ weight + bias, with the weight stored [in, out] as in GPT-2's checkpoints."""

    bias: (
        nn.Parameter | None
    )  # none where each rank has rows of the weight: it is added to the sum of all ranks

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(0, -2) @ self.weight
        if self.bias is not None:
            y.add_(self.bias)
        return y.view(*x.shape[:-1], -1)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of each row's key and the place in the row.

    A row is dropped alike in whatever micro-batch and on whatever process it is computed, and again when activations
    are recomputed. Without keys it is the identity, as in evaluation. Each site of the network has keys of its own
    (:func:`keys_at`), and no number of its own, for which a compiler would make code of its own.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # x [B, T, C], keys [B]
        if keys is None or not self.p or not self.training:
            return x
        low, high = keys & _MASK31, (keys >> 31) & _MASK31
        places = torch.arange(x[0].numel(), device=x.device)
        bits = _mix31(_mix31(places ^ low[:, None]) ^ high[:, None])
        kept = bits >= int(self.p * 2**31)  # [B, T*C]
        return x * kept.view_as(x).to(x.dtype) / (1 - self.p)


_MASK31 = 2**31 - 1


def keys_at(keys: Tensor | None, site: int) -> Tensor | None:
    """Return the keys of rows, int64 [B], at one of the sites that come after them in the network."""
    return (
        None if keys is None else keys + ((site * 0x9E3779B1 & _MASK31) << 31)
    )  # what overflows is not used


def _mix31(h: Tensor) -> Tensor:
    """Return a multiply-xorshift hash of 31-bit integers (the shape of MurmurHash3's finaliser), exact in int64."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK31
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & _MASK31
    return h ^ (h >> 16)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = Projection(config.n_embd, 3 * config.n_embd)
        self.c_proj = Projection(config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        q, k, v = (
            y.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for y in self.c_attn(x).chunk(3, dim=-1)
        )
        x = self.c_proj(
            causal_attention(q, k, v).transpose(1, 2).flatten(2)
        )  # q, k, v [B, H, T, C/H]
        return x


class MLP(nn.Module):
    """Two projections with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Projection(config.n_embd, 4 * config.n_embd)
        self.c_proj = Projection(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(F.gelu(self.c_fc(x)))
        return x


class Block(nn.Module):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = KeyedDropout(config.dropout)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)), keys)
        x = x + self.drop(self.mlp(self.ln_2(x)), keys_at(keys, 1))
        return x


class Stack(nn.Module):
    """Blocks that are computed one after the other, or those of one stage of a pipeline."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.compute_again = config.gradient_checkpointing
        self.held = range(config.n_layer)  # the blocks of this stage

    def through(
        self, blocks: nn.ModuleList, x: Tensor, keys: Tensor | None, *others: Tensor
    ) -> Tensor:
        for index in self.held:
            block, own = blocks[index], keys_at(keys, 2 * index + 1)
            if self.compute_again and self.training:  # dropout has its keys
                x = checkpoint(
                    block, x, own, *others, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, own, *others)
        return x


class Transformer(Stack):
    """The embeddings, the blocks and the last norm."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = KeyedDropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # [B, T] -> [B, T, C]
        if self.held.start == 0:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.drop(self.wte(x) + self.wpe(positions), keys)
        x = self.through(self.h, x, keys)
        if self.held.stop == len(self.h):
            x = self.ln_f(x)
        return x


class GPT(TrainableModel):
    """Embedding, ``n_layer`` blocks, layer norm, and a head that is the embedding's own matrix (tied)."""

    tp_plan: ClassVar[dict[str, str]] = {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.*.attn.c_attn": "colwise_of_3",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
    ends: ClassVar[dict[str, tuple[int, ...]]] = {
        "wte": (0, -1),
        "wpe": (0,),
        "ln_f": (-1,),
    }  # stages that hold them

    def __init__(self, config: GPTConfig, vocab_size: int, seed: int = 0) -> None:
        """Draw the first weights from ``seed``, but on the meta device, where they are filled later."""
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self._build(config, vocab_size)
        if not self.head.is_meta:
            fill(dict(self.named_parameters()), self.first_weights(seed))

    def _build(self, config: GPTConfig, vocab_size: int) -> None:
        self.transformer = Transformer(config, vocab_size)

    @property
    def body(self) -> Stack:
        """All but the head."""
        return self.transformer

    @property
    def head(self) -> Tensor:
        """The matrix [V, C] that makes logits."""
        return self.transformer.wte.weight

    @property
    def embedded(self) -> int:
        """The number of weights that are looked up and not multiplied with."""
        return self.transformer.wpe.weight.numel()

    @property
    def attending(self) -> int:
        """The number of layers with attention."""
        return self.config.n_layer

    def first_weights(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the first weights of every parameter, one at a time, drawn from ``seed`` alone.

        They are normal, with the deviation that :meth:`deviation_of` says.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
            if parameter.dim() < 2:
                nn.init.constant_(
                    drawn, 1.0 if name.endswith("weight") else 0.0
                )  # of norms; the others are biases
            else:
                nn.init.normal_(drawn, std=self.deviation_of(name), generator=generator)
            yield name, drawn

    def deviation_of(self, name: str) -> float:
        """Return the deviation that a matrix is drawn with.

        It is 0.02, and 0.02 / sqrt(2 n_layer) for what is added to the residual stream (Radford et al. 2019, section
        2.3).
        """
        return _INIT_STD * (1 / math.sqrt(2 * self.config.n_layer) if "c_proj" in name else 1.0)

    def nll(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor, dropout_keys: Tensor | None = None
    ) -> Tensor:
        """Return the summed negative log-likelihood in nats, of labels [B, T] that are not shifted.

        In a stage of a pipeline, hidden states [B, T - 1, C] go in, except for the first stage, and
        come out, except for the last.
        """
        held = self.body.held
        inputs = inputs_of(input_ids) if held.start == 0 else input_ids
        hidden: Tensor = self.body(inputs, dropout_keys)
        if held.stop < self.config.n_layer:
            return hidden
        return linear_nll(hidden, self.head, targets_of(labels))

    def outputs(self, input_ids: Tensor, dropout_keys: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return logits [B, T, V] of ``input_ids`` [B, T]."""
        return linear_logits(self.body(input_ids, dropout_keys), self.head)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of a batch that it takes beside tokens and labels."""
        return frozenset({"dropout_keys"} if self.config.dropout else ())

    @property
    def width(self) -> int:
        """The size of the hidden states."""
        return self.config.n_embd

    def stages_of(self, name: str, stages: int) -> tuple[int, ...]:
        """Return the stages of a pipeline that hold a parameter."""
        _, module, *rest = name.split(".")
        if module in self.ends:
            return tuple(stage % stages for stage in self.ends[module])
        return (int(rest[0]) * stages // self.config.n_layer,)

    def keep(self, stage: int, stages: int) -> None:
        """Compute one stage of a pipeline from now on. Raises :class:`UserError` where a stage has no layer."""
        if stages > self.config.n_layer:
            raise UserError(
                f"--pipeline_stages {stages}: there are {self.config.n_layer} layers (--n_layer)."
            )
        held = [n for n in range(self.config.n_layer) if n * stages // self.config.n_layer == stage]
        self.body.held = range(held[0], held[-1] + 1)

    def flops_per_token(self) -> int:
        """Return the operations of forward and backward, matrix products alone.

        They are 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), of L layers with attention.
        """
        c = self.config
        weights = sum(p.numel() for p in self.parameters()) - self.embedded
        return 6 * weights + 12 * self.attending * c.n_embd * c.block_size

    def bundle(
        self, tokenizer: "PreTrainedTokenizerFast", trained_on: str, seed: int
    ) -> ModelBundle:
        """Return the model, whose parameters are on the meta device, with everything it needs.

        Args:
            tokenizer: of the data.
            trained_on: the name of the data, for the model card.
            seed: of the initial weights.
        """
        return ModelBundle(
            model=self,
            files=self.files(tokenizer, trained_on),
            weights=self.first_weights(seed),
            columns=self.columns,
        )

    def files(self, tokenizer: "PreTrainedTokenizerFast", trained_on: str) -> ModelFiles:
        """Return the files of a folder that transformers loads as a stock model."""
        return ModelFiles(self.hf_config(tokenizer.eos_token_id), tokenizer, trained_on)

    def hf_config(self, end_of_text: int | None = None) -> Facts:
        """Return ``config.json`` of the stock ``gpt2`` model that computes the same."""
        c = self.config
        sizes = {
            "n_positions": c.block_size,
            "n_embd": c.n_embd,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
        }
        drops = {"embd_pdrop": c.dropout, "resid_pdrop": c.dropout, "attn_pdrop": 0.0}
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        kind: Facts = {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu",
        }
        kind |= {
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "initializer_range": _INIT_STD,
        }
        return {**kind, "dtype": "float32", "vocab_size": self.vocab_size, **sizes, **drops, **ends}
