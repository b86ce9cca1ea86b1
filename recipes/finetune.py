"""Fine-tune a causal LM of Hugging Face's on conversations, or go on training it on text.

accelerate launch recipes/finetune.py --model_name_or_path FOLDER_OR_HUB_NAME --dataset chats.jsonl --lora_r 16
"""

from dataclasses import asdict

from llmtrain import (
    ChatConfig,
    DataConfig,
    DDPConfig,
    Layout,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    data_parallel_size,
    eval_loader,
    given,
    identity_of,
    launch,
    leave_group,
    load_model,
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
    ModelConfig(from_config="llama", block_size=256),
    LoraConfig(),
    DataConfig(dataset=["builtin:python-functions"], tokenizer=None, eval_fraction=0.02, global_batch_size=8),
    ChatConfig(),
    OptimConfig(max_steps=600, learning_rate=5e-3, warmup_steps=30, weight_decay=0.01),
    DDPConfig(),
    RunConfig(output_dir="runs/finetune"),
)


def main(argv: list[str] | None = None) -> None:
    config, lora, data, chat, optim, ddp, run = parse(*DEFAULTS, argv=argv, description=__doc__)
    data.tokenizer = data.tokenizer or config.model_name_or_path or "bpe:2048"
    if config.model_name_or_path and not given(optim, "learning_rate"):
        optim.learning_rate = 2e-4 if lora.lora_r else 2e-5  # what has been trained before is trained on gently
        say("default", f"--learning_rate {optim.learning_rate:g}, of a model that was trained before")
    rows = prepare(data, config.block_size, chat, config.trust_remote_code)

    accelerator = start_accelerator(ddp, run.bitwise)
    layout = Layout.of(data, data_parallel_size(accelerator), run.bitwise)
    say("batch", str(layout))
    about = {"trained_on": rows.facts.dataset, "ends": rows.ends, "new_tokens": rows.new_tokens}
    modes = {"packed": rows.packed, "bitwise": run.bitwise}
    model, files, start = load_model(config, lora, rows.tokenizer, accelerator, run.seed, shard, **modes, **about)
    if run.dry_run:
        return preview(rows.train, rows.tokenizer)
    identity = identity_of(rows, data, optim, ddp, run, layout, accelerator, model=files.config, start=start)
    settings = resolved(config, lora, data, chat, optim, ddp, run)
    with open_run(accelerator, run, identity, files, settings, details=asdict(rows.facts)) as record:
        steps = range(record.step, optim.max_steps)
        shape = data.global_batch_size, layout.micro_batch
        batches = train_loader(rows.train, *shape, steps, run.seed, mixture=rows.mixture)
        held_out = eval_loader(rows.eval, layout.processes, layout.micro_batch) if rows.eval else None
        optimizer = make_optimizer(model, optim, accelerator.mixed_precision)
        model, optimizer, batches, held_out = accelerator.prepare(model, optimizer, batches, held_out)
        record.restore(model, optimizer)
        train(accelerator, model, optimizer, batches, held_out, optim, run, record, rows.facts.eval_bytes)
    leave_group()
    if accelerator.is_main_process and record.step == optim.max_steps:
        show_result(record.folder, rows.unseen_question())
        publish(record.folder / "model", run.push_to_hub)


if __name__ == "__main__":
    launch(main)
