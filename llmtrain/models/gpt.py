"""A GPT-2 to read in one sitting: GPT-2's parameter names and shapes, without its other history.

The state dict of this model is the one of Hugging Face's ``GPT2LMHeadModel`` without the tied head,
name by name and shape by shape.

Shapes: B rows, T positions, C = n_embd, H heads, D = C / H, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import ModelBundle
from llmtrain.models.attention import causal_attention, ready_documents
from llmtrain.models.config import GPTConfig
from llmtrain.models.documents import Documents
from llmtrain.models.export import ModelFiles
from llmtrain.models.loss import inputs_of, linear_nll, matmul_dtype, targets_of
from llmtrain.models.trainable import TrainableModel
from llmtrain.parallel.shards import fill
from llmtrain.seeds import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_INIT_STD = 0.02
_MASK31 = 2**31 - 1


class Projection(nn.Module):
    """A linear layer x @ weight + bias, with the weight stored [in, out] as in GPT-2's checkpoints.

    Attributes:
        weight: [in, out].
        bias: [out].
    """

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.empty(n_out))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if x.is_cuda:
            # One kernel. With an addition of its own, autocast would add a float32 bias, which no
            # compiler fuses with a product in 16 bits.
            y = torch.addmm(self.bias, rows, self.weight)
        else:
            # On a CPU this takes less time than addmm.
            y = rows @ self.weight
            y.add_(self.bias)
        return y.view(*x.shape[:-1], -1)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of each row's key and of the position in the row.

    A row gets the same mask in any micro-batch and on any process, and again if its activations are
    recomputed. Without keys, as in evaluation, nothing is dropped.

    Each use of dropout in the network needs different keys, which :func:`keys_at` makes. A module
    has no number of its own instead, because a compiler would compile it once for each number.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Drop elements of x [B, T, C], with keys int64 [B]."""
        if keys is None or not self.p or not self.training:
            return x
        low = keys & _MASK31
        high = (keys >> 31) & _MASK31
        indices = torch.arange(x[0].numel(), device=x.device)
        bits = _mix31(_mix31(indices ^ low[:, None]) ^ high[:, None])
        is_kept = bits >= int(self.p * 2**31)  # [B, T * C]
        return x * is_kept.view_as(x).to(x.dtype) / (1 - self.p)


def keys_at(keys: Tensor | None, site: int) -> Tensor | None:
    """Return the keys of rows, int64 [B], for another use of dropout in the network.

    Args:
        keys: the keys of the rows, or ``None``.
        site: which use of dropout it is. At 0, the keys stay as they are.
    """
    if keys is None:
        return None
    return keys + ((site * 0x9E3779B1 & _MASK31) << 31)  # the bits that overflow are not used


def _mix31(h: Tensor) -> Tensor:
    """Return a multiply-xorshift hash of 31-bit integers, exact in int64.

    It has the shape of MurmurHash3's finaliser.
    """
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK31
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & _MASK31
    return h ^ (h >> 16)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.c_attn = Projection(config.n_embd, 3 * config.n_embd)
        self.c_proj = Projection(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, documents: Documents | None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        # [B, T, 3 C] -> three times [B, H, T, D]
        heads = self.c_attn(x).view(*x.shape[:2], 3, -1, self.head_size)
        q, k, v = heads.transpose(1, 3).unbind(2)
        y = causal_attention(q, k, v, documents)
        y = y.transpose(1, 2).flatten(2)
        x = self.c_proj(y)
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


class LayerNorm(nn.LayerNorm):
    """A layer norm that sums the gradients of its weights in float32.

    On a CPU, torch sums them in the dtype of the weights.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(dtype)
        bias = self.bias.to(dtype)
        y = F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)
        return y.to(x.dtype)


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it, and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)
        self.drop = KeyedDropout(config.dropout)

    def forward(self, x: Tensor, keys: Tensor | None, documents: Documents | None = None) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x), documents), keys)
        x = x + self.drop(self.mlp(self.ln_2(x)), keys_at(keys, 1))
        return x


class Stack(nn.Module):
    """Blocks that are computed one after the other.

    Attributes:
        recomputes: whether blocks recompute their activations in the backward pass.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.recomputes = bool(config.gradient_checkpointing)

    def run_blocks(
        self,
        blocks: nn.ModuleList,
        x: Tensor,
        keys: Tensor | None,
        *extra: Tensor | Documents | None,
    ) -> Tensor:
        """Return the hidden states [B, T, C] after all blocks.

        Args:
            blocks: the blocks.
            x: hidden states [B, T, C].
            keys: the keys of dropout, int64 [B].
            extra: further inputs of every block.
        """
        for index, block in enumerate(blocks):
            block_keys = keys_at(keys, 2 * index + 1)
            compute: Callable[..., Tensor] = block
            if self.recomputes and self.training:
                # Dropout depends on its keys only, so no state of a generator has to be restored.
                compute = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            x = compute(x, block_keys, *extra)
        return x


class Transformer(Stack):
    """The embeddings, the blocks and the last norm."""

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = KeyedDropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd)

    def forward(self, x: Tensor, keys: Tensor | None, documents: Documents | None = None) -> Tensor:
        """[B, T] -> [B, T, C]."""
        positions = torch.arange(x.shape[1], device=x.device)
        if documents is not None and documents.starts is not None:
            positions = positions - documents.starts
        x = self.drop(self.wte(x) + self.wpe(positions), keys)

        x = self.run_blocks(self.h, x, keys, documents)
        x = self.ln_f(x)
        return x


class GPT(TrainableModel):
    """Embeddings, ``n_layer`` blocks, a norm, and a head that is tied to the token embedding.

    Args:
        config: the sizes.
        vocab_size: the number of tokens that the model knows, V.
        seed: of the initial weights. On the meta device they are not initialised yet.
    """

    attention_class: ClassVar[type[nn.Module]] = Attention

    def __init__(self, config: GPTConfig, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self._build(config, vocab_size)
        if not self.head.is_meta:
            fill(dict(self.named_parameters()), self.initial_weights(seed))

    def _build(self, config: GPTConfig, vocab_size: int) -> None:
        self.transformer = Transformer(config, vocab_size)

    @property
    def base_model(self) -> Stack:
        """Everything but the head."""
        return self.transformer

    @property
    def head(self) -> Tensor:
        """The matrix [V, C] that hidden states are multiplied with to get logits."""
        return self.transformer.wte.weight

    def recompute_blocks(self, enabled: bool) -> None:
        """Let all blocks recompute their activations in the backward pass, or none."""
        self.base_model.recomputes = enabled

    def initial_weights(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the initial weights of every parameter by name, one at a time.

        They depend only on ``seed``. Matrices are normal with the standard deviation of
        :meth:`init_std`, the weights of norms are 1, and biases are 0.
        """
        generator = torch.Generator().manual_seed(seed_of(seed, "initial weights"))
        for name, parameter in self.named_parameters():
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            if parameter.dim() < 2:
                is_norm = name.endswith("weight")
                nn.init.constant_(values, 1.0 if is_norm else 0.0)
            else:
                nn.init.normal_(values, std=self.init_std(name), generator=generator)
            yield name, values

    def init_std(self, name: str) -> float:
        """Return the standard deviation of the initial weights of a matrix.

        It is 0.02, or 0.02 / sqrt(2 n_layer) for projections whose output is added to the residual
        stream (Radford et al. 2019, section 2.3).
        """
        if "c_proj" in name:
            return _INIT_STD * (1 / math.sqrt(2 * self.config.n_layer))
        return _INIT_STD

    def nll(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        target_positions: Tensor | None = None,
        per_target: bool = False,
        **columns: Any,
    ) -> Tensor:
        """Return the summed negative log-likelihood of the labels [B, T], in nats.

        Args:
            input_ids: tokens [B, T].
            labels: [B, T], which are not shifted.
            target_positions: int64 [N], which of the flattened targets [B * (T - 1)] count.
            per_target: return the nll of each target instead of their sum.
            columns: see :meth:`hidden`.
        """
        return linear_nll(
            self.hidden(input_ids, **columns),
            self.head,
            targets_of(labels),
            target_positions=target_positions,
            per_target=per_target,
        )

    def hidden(
        self,
        input_ids: Tensor,
        dropout_keys: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
        **other_columns: object,
    ) -> Tensor:
        """Return the last hidden states [B, T - 1, C] of all positions that have a next token.

        Args:
            input_ids: tokens [B, T].
            dropout_keys: int64 [B].
            position_ids: [B, T], restarting at each document of a row. Tokens attend to nothing
                before their document.
            documents: the documents of the rows, if :meth:`prepare_batch` has found them.
            other_columns: columns of the micro-batch that this model does not need.
        """
        if position_ids is not None:
            documents = documents or Documents.of(inputs_of(position_ids))
            documents = ready_documents(documents, matmul_dtype(input_ids.device, self.head.dtype))
        hidden: Tensor = self.base_model(inputs_of(input_ids), dropout_keys, documents)
        return hidden

    def logits(self, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return the logits [B, T - 1, V] of all positions that have a next token."""
        return F.linear(self.hidden(input_ids, **columns), self.head)

    def logits_at(self, positions: Tensor, input_ids: Tensor, **columns: Any) -> Tensor:
        """Return float32 logits [N, V] at ``positions`` [N], indices into [B * (T - 1)]."""
        hidden = self.hidden(input_ids, **columns).flatten(0, 1)
        return F.linear(hidden.index_select(0, positions), self.head).float()

    def outputs(
        self,
        input_ids: Tensor,
        dropout_keys: Tensor | None = None,
        position_ids: Tensor | None = None,
        **other_columns: object,
    ) -> Tensor:
        """Return logits [B, T, V] for ``input_ids`` [B, T].

        The documents among the columns are those of the first T - 1 positions, so they are found
        again here.
        """
        documents = None
        if position_ids is not None:
            documents = Documents.of(position_ids)
            documents = ready_documents(documents, matmul_dtype(input_ids.device, self.head.dtype))
        return F.linear(self.base_model(input_ids, dropout_keys, documents), self.head)

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return the documents of a micro-batch whose rows have position ids.

        Computed on the host to avoid a device sync.
        """
        if "position_ids" not in batch:
            return {}
        on_gpu = self.head.device.type == "cuda"
        return {"documents": Documents.of(inputs_of(batch["position_ids"]), on_gpu)}

    def flops_per_token(self) -> int:
        """Return the floating-point operations of a forward and backward pass, per token.

        Only matrix products count: 6 N + 12 L C T for N weights and L layers with attention
        (Chowdhery et al. 2022, appendix B).
        """
        config = self.config
        weights = sum(p.numel() for p in self.parameters())
        for module in self.modules():
            # An embedding multiplies nothing, unless it is the head as well.
            if isinstance(module, nn.Embedding) and module.weight is not self.head:
                weights -= module.weight.numel()
        layers = sum(isinstance(module, self.attention_class) for module in self.modules())
        attention = layers * config.n_embd * config.block_size
        return 6 * weights + 12 * attention

    def bundle(
        self, tokenizer: "PreTrainedTokenizerFast | None", trained_on: str, seed: int
    ) -> ModelBundle:
        """Return the model with everything that training needs.

        The parameters of the model are on the meta device.

        Args:
            tokenizer: of the data, if there is one.
            trained_on: the name of the data, for the model card.
            seed: of the initial weights.
        """
        return ModelBundle(
            model=self,
            files=self.files(tokenizer, trained_on),
            weights=self.initial_weights(seed),
            columns=frozenset({"dropout_keys"} if self.config.dropout else ()),
            prepare_batch=self.prepare_batch,
        )

    def files(self, tokenizer: "PreTrainedTokenizerFast | None", trained_on: str) -> ModelFiles:
        """Return the files of a model folder that transformers loads as a stock model."""
        end_of_text = None if tokenizer is None else tokenizer.eos_token_id
        return ModelFiles(self.hf_config(end_of_text), tokenizer, trained_on)

    def hf_config(self, end_of_text: int | None = None) -> JsonObject:
        """Return ``config.json`` of the stock ``gpt2`` model that computes the same."""
        config = self.config
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "initializer_range": _INIT_STD,
            "dtype": "float32",
            "vocab_size": self.vocab_size,
            "n_positions": config.block_size,
            "n_ctx": config.block_size,  # for llama.cpp's converter
            "n_embd": config.n_embd,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "attn_pdrop": 0.0,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
        }
