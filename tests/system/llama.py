"""A recipe of the tests: a small Llama of Hugging Face's, from its config, through the package's own loop."""

from dataclasses import asdict

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain import (
    DataConfig,
    Layout,
    ModelFiles,
    OptimConfig,
    RunConfig,
    eval_loader,
    launch,
    make_optimizer,
    open_run,
    parse,
    prepare,
    resolved,
    start_accelerator,
    train,
    train_loader,
)
from llmtrain.models.loss import inputs_of, summed_nll, targets_of

DEFAULTS = (
    DataConfig(tokenizer="byte", global_batch_size=8, per_device_train_batch_size=2),
    OptimConfig(max_steps=6, warmup_steps=2),
    RunConfig(output_dir="runs/llama", report_to=["none"], logging_steps=1),
)


class SummingLlama(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(inputs_of(input_ids), use_cache=False).logits
        return summed_nll(logits, targets_of(labels))


def main(argv: list[str] | None = None) -> None:
    data, optim, run = parse(*DEFAULTS, argv=argv)
    rows = prepare(data, 32)
    accelerator = start_accelerator(run.bitwise, run.ddp_timeout)
    layout = Layout.of(data, accelerator.num_processes, run.bitwise)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["attention_dropout"] = 0.0 if run.bitwise else 0.1
    config = LlamaConfig(vocab_size=len(rows.tokenizer), max_position_embeddings=32, num_key_value_heads=2, **sizes)
    torch.manual_seed(run.seed)
    model = SummingLlama(config)
    files = ModelFiles({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, rows.tokenizer)
    identity = {"model": sizes, "data": rows.facts.data_sha256, "seed": run.seed, "update": asdict(optim)}
    with open_run(accelerator, run, identity, files, resolved(data, optim, run)) as record:
        steps = range(record.step, optim.max_steps)
        batches = train_loader(rows.train, data.global_batch_size, layout.micro_batch, steps, run.seed)
        held_out = eval_loader(rows.eval, layout.processes, layout.micro_batch)
        optimizer = make_optimizer(model, optim)
        model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
        record.restore(model, optimizer)
        train(accelerator, model, optimizer, batches, held_out, optim, run, record, rows.facts.eval_bytes)


if __name__ == "__main__":
    launch(main)
