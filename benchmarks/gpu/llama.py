"""A step of Llama: 1.4B parameters trained in full, and LoRA adapters of 8B against TRL.

Both are timed alone, because two models would not fit on a card together. TRL's SFTTrainer has the
same model, as many positions in a step, packing and Liger's kernels.

Repeat it with `python -m benchmarks.gpu --out FOLDER --sections billion adapters trl`.
"""

import gc
import importlib.util
import time
from typing import Any

import datasets
import torch

import llmtrain as lt
from benchmarks.gpu.call import Call, LlamaSize
from benchmarks.gpu.loops import RecipeLoop, common_settings
from benchmarks.gpu.rows import packed_rows, target_share, text_rows
from benchmarks.gpu.turns import take_turns
from llmtrain.models.attention import ATTENTION_NAME, register
from llmtrain.models.causal_lm import make_causal_lm
from llmtrain.models.lora import add_lora
from llmtrain.models.probe import probe

_ROWS = 64
_LORA_RANK = 16
_TRL_WARM_UP_STEPS = 4


def measure_billion(call: Call) -> None:
    """Time a Llama of 1.4 billion parameters that is trained in full, eager and compiled."""
    accelerator = call.accelerator()
    size = call.sizes.billion
    rows = text_rows(size.vocabulary, size.block, _ROWS)
    for compiled in (False, True):
        settings = _settings(call, size, compiled and call.on_gpu)
        name = f"Llama 1.4B in full, {'compiled' if compiled else 'eager'}"
        build = _Build(size, call.device, dtype=torch.float32)
        loop = RecipeLoop(name, accelerator, settings, rows=rows, build=build)
        _time(call, loop)


def measure_adapters(call: Call) -> None:
    """Time LoRA adapters of a Llama of eight billion parameters, with and without recomputation."""
    accelerator = call.accelerator()
    size = call.sizes.eight_billion
    rows = packed_rows(size.vocabulary, size.block, _ROWS)
    ways = {
        "activations kept": (False, False),
        "activations kept, compiled": (False, True),
        "recomputed": (True, False),
    }
    for way, (recomputes, compiled) in ways.items():
        settings = _settings(call, size, compiled and call.on_gpu)
        build = _Build(size, call.device, dtype=call.half, rank=_LORA_RANK, recomputes=recomputes)
        loop = RecipeLoop(f"8B LoRA, {way}", accelerator, settings, rows=rows, build=build)
        _time(call, loop, target_share=target_share(rows))


def measure_trl(call: Call) -> None:
    """Time TRL's SFTTrainer on the same model and as many positions, with packing and Liger."""
    missing = [name for name in ("trl", "peft") if not _is_installed(name)]
    if missing:
        call.journal.record("trl", "TRL", left_out=f"{' and '.join(missing)} are not installed")
        return

    for recomputes in (False, True):
        if call.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        milliseconds = _milliseconds_of_trl(call, recomputes)
        speed = 1000 * call.sizes.eight_billion.positions / milliseconds
        call.journal.record(
            "trl",
            f"TRL, 8B LoRA, {'recomputed' if recomputes else 'activations kept'}",
            ms=milliseconds,
            GiB=torch.cuda.max_memory_allocated() / 2**30 if call.on_gpu else 0.0,
            **{"tokens/s": speed},
        )
        _free(call)


def _milliseconds_of_trl(call: Call, recomputes: bool) -> float:
    """Return the mean milliseconds of a step of TRL's SFTTrainer, after some steps to warm up."""
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    size = call.sizes.eight_billion
    rows = packed_rows(size.vocabulary, size.block, _ROWS)
    tokens = rows.train.column("input_ids").tolist()
    ends: list[float] = []  # when each step has ended, in seconds

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if call.on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    settings = SFTConfig(
        output_dir=str(call.folder / "trl"),
        per_device_train_batch_size=size.rows,
        max_length=size.block,
        packing=True,
        packing_strategy="wrapped",
        gradient_checkpointing=recomputes,
        use_liger_kernel=call.on_gpu and _is_installed("liger_kernel"),
        bf16=call.on_gpu,
        max_steps=_TRL_WARM_UP_STEPS + call.sizes.slow_steps,
        use_cpu=not call.on_gpu,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=_new_llama(size, call.device, call.half),
        args=settings,
        processing_class=_any_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"input_ids": [row[:-1] for row in tokens]}),
        peft_config=LoraConfig(r=_LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Watch()],
    )
    trainer.train()
    seconds = ends[-1] - ends[_TRL_WARM_UP_STEPS - 1]
    return 1000 * seconds / call.sizes.slow_steps


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _any_tokenizer() -> Any:
    """Return a tokenizer, which TRL asks for the tokens of the end and of padding alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


class _Build:
    """Builds a Llama with random weights directly on the device, as the fine-tuning recipe wraps it.

    Args:
        size: of the model.
        device: of the weights.
        dtype: of the weights.
        rank: of LoRA adapters; 0 trains all weights.
        recomputes: whether activations are computed again in the backward pass.
    """

    def __init__(
        self,
        size: LlamaSize,
        device: torch.device,
        dtype: torch.dtype,
        rank: int = 0,
        recomputes: bool = False,
    ) -> None:
        self.size = size
        self.device = device
        self.dtype = dtype
        self.rank = rank
        self.recomputes = recomputes

    def __call__(self, settings: lt.Settings, rows: lt.Tokenized, precision: str) -> lt.ModelBundle:
        register()
        model = _new_llama(self.size, self.device, self.dtype)
        model.config._attn_implementation = ATTENTION_NAME
        if self.recomputes:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if self.rank:
            lora = lt.LoraConfig(lora_r=self.rank)
            add_lora(model, lora, seed=0, new_tokens=[])
        trained = make_causal_lm(model, row_length=self.size.block + 1)
        return lt.ModelBundle(
            model=trained,
            prepare_batch=trained.prepare_batch,
            check=lambda: probe(trained),
        )


def _new_llama(size: LlamaSize, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=max(size.width // 128, 2),
        num_key_value_heads=max(size.width // 512, 1),
        max_position_embeddings=size.block + 1,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=dtype)


def _settings(call: Call, size: LlamaSize, compiled: bool) -> lt.Settings:
    return lt.Settings(**common_settings(call.folder / "llama", size.rows, compiled))


def _time(call: Call, loop: RecipeLoop, target_share: float = 1.0) -> None:
    """Time one loop: two Llamas would not fit on a card together."""
    results = take_turns(
        [loop], device=call.device, steps=call.sizes.slow_steps, rounds=1, peak_flops=call.peak
    )
    for name, figures in results.items():
        call.journal.record("llama", name, target_share=target_share, **figures)
    loop.close()
    _free(call)


def _free(call: Call) -> None:
    gc.collect()
    if call.on_gpu:
        torch.cuda.empty_cache()
