"""Train a GPT from scratch on text, and leave a model that Hugging Face can load.

accelerate launch --config_file accelerate_configs/cpu.yaml recipes/gpt.py --max_steps 100
"""

from dataclasses import asdict

from llmtrain import (
    GPT,
    DataConfig,
    DDPConfig,
    GPTConfig,
    Layout,
    ModelFiles,
    OptimConfig,
    PipelineConfig,
    RunConfig,
    data_parallel_size,
    empty_if_sharded,
    eval_loader,
    identity_of,
    launch,
    leave_group,
    make_optimizer,
    open_run,
    parse,
    prepare,
    preview,
    publish,
    resolved,
    say,
    shard,
    show_result,
    start_accelerator,
    train,
    train_loader,
)

DEFAULTS = (
    GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128),
    DataConfig(dataset=["builtin:python-docs"], tokenizer="bpe:2048", eval_fraction=0.05, global_batch_size=32),
    OptimConfig(optim="muon", max_steps=300, learning_rate=1e-2, warmup_steps=20),
    DDPConfig(),
    PipelineConfig(),
    RunConfig(output_dir="runs/gpt"),
)


def main(argv: list[str] | None = None) -> None:
    gpt, data, optim, ddp, pipeline, run = parse(*DEFAULTS, argv=argv, description=__doc__)
    rows = prepare(data, gpt.block_size)  # text -> tokens -> rows on disk, before the process group exists

    accelerator = start_accelerator(ddp, run.bitwise, pipeline.pipeline_stages)
    layout = Layout.of(data, data_parallel_size(accelerator), run.bitwise)
    say("batch", str(layout))
    with empty_if_sharded(accelerator):
        model = GPT(gpt, vocab_size=rows.facts.vocabulary, seed=run.seed)
    say("model", f"{sum(p.numel() for p in model.parameters()):,} parameters")
    files = ModelFiles(model.hf_config(rows.tokenizer.eos_token_id), rows.tokenizer, trained_on=rows.facts.dataset)
    shard(accelerator, model, model.first_weights(run.seed))
    if run.dry_run:
        return preview(rows.train, rows.tokenizer)
    identity = identity_of(rows, data, optim, ddp, run, layout, accelerator, model=files.config)
    settings = resolved(gpt, data, optim, ddp, pipeline, run)
    with open_run(accelerator, run, identity, files, settings, details=asdict(rows.facts)) as record:
        steps = range(record.step, optim.max_steps)
        dropout_seed = run.seed if gpt.dropout else None
        shape = data.global_batch_size, layout.micro_batch
        batches = train_loader(rows.train, *shape, steps, run.seed, dropout_seed, rows.mixture)
        held_out = eval_loader(rows.eval, layout.processes, layout.micro_batch) if rows.eval else None
        optimizer = make_optimizer(model, optim, accelerator.mixed_precision)
        model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
        record.restore(model, optimizer)
        train(accelerator, model, optimizer, batches, held_out, optim, run, record, rows.facts.eval_bytes)
    leave_group()
    if accelerator.is_main_process and record.step == optim.max_steps:
        show_result(record.folder)
        publish(record.folder / "model", run.push_to_hub)


if __name__ == "__main__":
    launch(main)
