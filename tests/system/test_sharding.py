"""A run with a sharded model trains like a run on one process, and leaves the same checkpoints."""

import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.record.checkpoint import find_fault
from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    LONG,
    PYTHON,
    ROOT,
    SIX_STEPS,
    TINY,
    accelerate,
    interrupt,
    long_form,
    read_json,
    series,
    torchrun,
)
from tests.system.sharded_ranks import Case

SCRIPT = "tests/system/sharded_ranks.py"
LAUNCHERS = {
    "one process": PYTHON,
    "DDP 2": accelerate("cpu_ddp"),
    "FSDP2 2": accelerate("fsdp2"),
    "FSDP2 4": accelerate("fsdp2", "--num_processes", "4"),
    "HSDP 2x2": accelerate("hsdp", *shlex.split("--num_machines 1 --main_process_port 0")),
}

# `sharded_ranks.Case` explains these names.
SHORT_CASES = shlex.split(
    "gpt/1 gpt/4 gpt-each/4 gpt-muon/1 gpt-8bit/1 llama/1 llama/4 mixtral/1 "
    "base_of_experts-lora/1 base-dora-grown/1 half-lora/1 tied-lora-grown/1"
)
# qwen3, phi3 and gpt_neox have norms inside heads, joined projections, and fused heads.
LONG_CASES = shlex.split(
    "base-dora/1 base-full/1 base-lora/1 base-lora/4 base-lora-saved/1 gpt2base-dora/1 lfm2/4 "
    "lfm2-muon/1 tied-full-again/4 qwen3/1 phi3/1 gpt_neox/1"
)
CASES = [*SHORT_CASES, *LONG_CASES] if LONG else SHORT_CASES
STEPS = 5 if LONG else 3

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
LLAMA = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make models to fine-tune. Their weights are in several files."""
    configs = {
        "base": AutoConfig.for_model("llama", **LLAMA),
        "tied": AutoConfig.for_model("llama", **LLAMA | {"tie_word_embeddings": True}),
        "half": AutoConfig.for_model("llama", **LLAMA, dtype="bfloat16"),
        "gpt2base": AutoConfig.for_model("gpt2", **SIZES),
        "base_of_experts": AutoConfig.for_model("mixtral", **LLAMA, num_local_experts=4),
    }
    folder = tmp_path_factory.mktemp("bases")
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name, max_shard_size="100KB")
    return folder


# --- steps

Results = dict[str, dict[str, Any]]  # of sharded_ranks.py, by case


def results_of(launcher: list[str], bases: Path, folder: Path, cases: list[str] = CASES) -> Results:
    run_forked(
        [*launcher, SCRIPT, str(bases), str(folder), str(STEPS), *cases], timeout=600
    ).assert_ok()
    results: Results = read_json(folder / "results.json")
    for name, result in results.items():
        result["folder"] = folder / Case.parse(name).folder_name
    return results


@pytest.fixture(scope="module")
def on_one_process(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(PYTHON, bases, tmp_path_factory.mktemp("one") / "results")


@pytest.fixture(scope="module")
def on_two_processes(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(LAUNCHERS["FSDP2 2"], bases, tmp_path_factory.mktemp("two") / "results")


def weights_of(result: dict[str, Any]) -> torch.Tensor:
    tensors = dict(read_tensors(result["folder"]))
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def largest_difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    pairs = zip(values, reference, strict=True)
    return max(abs(value / expected - 1) for value, expected in pairs)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [
        "FSDP2 2",
        *(pytest.param(name, marks=long_form) for name in ("HSDP 2x2", "FSDP2 4", "DDP 2")),
    ],
)
def test_every_layout_makes_the_steps_of_one_process(
    layout: str,
    request: pytest.FixtureRequest,
    bases: Path,
    on_one_process: Results,
    tmp_path: Path,
    score: Callable[[str], None],
) -> None:
    if layout == "FSDP2 2":
        results = request.getfixturevalue("on_two_processes")
    else:
        cases = CASES if layout == "FSDP2 4" else SHORT_CASES
        results = results_of(LAUNCHERS[layout], bases, tmp_path / "results", cases)
    local_share = {"FSDP2 2": 0.5, "HSDP 2x2": 0.5, "FSDP2 4": 0.25, "DDP 2": 1.0}[layout]

    for name, result in results.items():
        reference = on_one_process[name]
        is_bfloat16 = Case.parse(name).model == "half"
        # The rounding of bfloat16 grows from step to step, most of all in the norm.
        compared_norms = 3 if is_bfloat16 else STEPS

        losses = largest_difference(result["losses"], reference["losses"])
        norms = largest_difference(
            result["grad_norms"][:compared_norms], reference["grad_norms"][:compared_norms]
        )
        expected = weights_of(reference)
        weights = float((weights_of(result) - expected).norm() / expected.norm())

        differences = f"losses {losses:.1e}, norms {norms:.1e}, weights {weights:.1e}"
        score(f"sharding: {layout}: {name}: {differences}")
        tolerance_factor = 1000 if is_bfloat16 else 1
        if "8bit" in name:  # the sum of a gradient decides between two neighbouring codes
            tolerance_factor = 10
        assert losses < 1e-5 * tolerance_factor, name
        assert norms < 1e-4 * tolerance_factor, name
        assert weights < 1e-4 * tolerance_factor, name
        assert len(set(result["losses"])) == STEPS, "each step changes the loss"
        assert result["local_share"] == pytest.approx(local_share, abs=0.03), name


@long_form
def test_shards_on_the_host_make_the_steps_of_one_process(
    bases: Path, on_one_process: Results, tmp_path: Path
) -> None:
    fsdp2 = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    config = tmp_path / "offload.yaml"
    config.write_text(fsdp2.replace("offload_params: false", "offload_params: true"))
    launcher = [str(BIN / "accelerate"), "launch", "--config_file", str(config)]
    cases = ["gpt/4", "llama/1", "base-lora/1"]

    results = results_of(launcher, bases, tmp_path / "results", cases)

    for name, result in results.items():
        assert result["losses"] == pytest.approx(on_one_process[name]["losses"], rel=1e-5)


# --- shards


def expected_units(model: str) -> int:
    """Count the units of FSDP2: two blocks, embeddings with weights of their own, and the rest."""
    if model in ("gpt", "lfm2"):
        embeddings = 0  # in the rest
    elif model in ("tied", "gpt2base"):
        embeddings = 1
    else:
        embeddings = 2
    return 3 + embeddings


def test_tied_embeddings_stay_tied_in_one_unit(
    on_one_process: Results, on_two_processes: Results
) -> None:
    for name, result in on_two_processes.items():
        model = Case.parse(name).model
        assert result["is_tied"] is (model in ("tied", "gpt2base")), name
        assert result["units"] == expected_units(model), name
    assert on_one_process["llama/1"]["units"] == 0


@pytest.mark.parametrize(
    ("name", "syncs"), [("gpt/1", 1), ("gpt/4", 1), ("llama/4", 1), ("gpt-each/4", 4)]
)
def test_gradients_are_reduced_once_a_step_or_once_a_micro_batch(
    name: str, syncs: int, on_two_processes: Results
) -> None:
    result = on_two_processes[name]
    assert result["gradient_syncs"] == [syncs] * STEPS
    assert result["reduce_scatters"] == [syncs * result["units"]] * STEPS


# --- models and checkpoints


@pytest.mark.parametrize("name", ["gpt/1", "llama/1", "mixtral/1"])
def test_transformers_loads_a_sharded_model(name: str, on_two_processes: Results) -> None:
    folder = on_two_processes[name]["folder"]

    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

    model, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    elements = sum(tensor.numel() for _, tensor in read_tensors(folder))
    assert elements == model.num_parameters()

    adapter = on_two_processes["tied-lora-grown/1"]["folder"]
    assert [path.name for path in adapter.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_a_sharded_model_can_be_written_in_another_dtype(on_two_processes: Results) -> None:
    folder = on_two_processes["mixtral/1"]["folder"]
    folder_in_bfloat16 = folder.with_name("mixtral-1-bfloat16")

    trained = dict(read_tensors(folder))
    written = dict(read_tensors(folder_in_bfloat16))

    assert written.keys() == trained.keys()
    for name, tensor in trained.items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor.bfloat16()), name
    index = read_json(folder_in_bfloat16 / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert AutoModelForCausalLM.from_pretrained(folder_in_bfloat16).dtype == torch.bfloat16


def test_two_ranks_write_checkpoints_together(tmp_path: Path) -> None:
    run_forked([*torchrun(2), "tests/system/team_ranks.py", str(tmp_path)]).assert_ok()


# --- resuming

MAX_STEPS = 60 if LONG else 16
SAVE_STEPS = MAX_STEPS // 2
RUN_FLAGS = [
    *TINY,
    *shlex.split(
        f"--max_steps {MAX_STEPS} --save_steps {SAVE_STEPS} --eval_steps {SAVE_STEPS} "
        "--dropout 0.1 --log_rows"
    ),
]
LAST_CHECKPOINT = f"checkpoints/step-{MAX_STEPS:08d}"


@pytest.fixture(scope="module")
def uninterrupted(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on one process, without an interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    flags = f"--dataset {text_file} --output_dir {folder} --sample_prompts The"
    run_forked([*PYTHON, GPT, *RUN_FLAGS, *shlex.split(flags)]).assert_ok()
    return folder


def assert_same_run(folder: Path, reference: Path) -> None:
    """Assert that a run had the rows and the losses of another one, up to rounding."""
    assert (folder / "rows.jsonl").read_text() == (reference / "rows.jsonl").read_text()

    losses = series(reference, "train/loss")
    assert series(folder, "train/loss") == pytest.approx(losses, rel=1e-5)

    # A resumed run may have fewer of these.
    weight_norms = series(folder, "train/weight_norm")
    expected_norms = series(reference, "train/weight_norm")
    for step, norm in weight_norms.items():
        assert norm == pytest.approx(expected_norms[step], rel=1e-5)
    assert series(folder, "batch").items() <= series(reference, "batch").items()

    assert find_fault(folder / LAST_CHECKPOINT) is None
    for model in (folder / LAST_CHECKPOINT / "model", folder / "model"):
        assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0


@pytest.mark.parametrize("layout", ["FSDP2 2", pytest.param("HSDP 2x2", marks=long_form)])
def test_a_sharded_run_resumes_a_checkpoint_of_one_process(
    layout: str, text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    checkpoint = uninterrupted / "checkpoints" / f"step-{SAVE_STEPS:08d}"
    flags = (
        f"--dataset {text_file} --output_dir {folder} --sample_prompts The --async_save "
        f"--resume_from_checkpoint {checkpoint}"
    )

    ended = run_forked([*LAUNCHERS[layout], GPT, *RUN_FLAGS, *shlex.split(flags)]).assert_ok()

    assert_same_run(folder, uninterrupted)
    samples = (folder / "samples.jsonl").read_text()
    assert samples == (uninterrupted / "samples.jsonl").read_text()

    _, _, after_heading = ended.out.partition(f"--- a sample of {folder}/model ")
    _, _, sample = after_heading.partition("\n")
    assert len(sample.partition("\n---")[0]) > 10, "all ranks generate the sample"

    states = dict(read_tensors(folder / LAST_CHECKPOINT / "optimizer"))
    expected_states = dict(read_tensors(uninterrupted / LAST_CHECKPOINT / "optimizer"))
    assert states.keys() == expected_states.keys()
    for name, state in expected_states.items():
        torch.testing.assert_close(states[name], state, rtol=1e-2, atol=1e-6)


@long_form
def test_a_run_resumes_in_any_layout(text_file: Path, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [*RUN_FLAGS, *shlex.split(f"--dataset {text_file} --output_dir {folder}")]
    layouts = ["FSDP2 4", "DDP 2", "HSDP 2x2", "one process", "FSDP2 2"]

    *interrupted_layouts, last_layout = layouts
    for number, layout in enumerate(interrupted_layouts, start=1):
        interrupt([*LAUNCHERS[layout], GPT, *flags], folder, signal.SIGTERM, 9 * number)
    run_forked([*LAUNCHERS[last_layout], GPT, *flags]).assert_ok()

    starts = read_json(folder / "run.json")["starts"]
    assert [start["sharded"] for start in starts] == ["1x4", None, "2x2", None, "1x2"]
    assert all(start["step"] > 0 for start in starts[1:])
    assert_same_run(folder, uninterrupted)


# --- the shipped config


def assert_trained_in_bfloat16(folder: Path) -> None:
    [start] = read_json(folder / "run.json")["starts"]
    assert start["processes"] == 2
    assert start["sharded"] == "1x2"
    assert start["mixed_precision"] == "bf16"

    losses = torch.tensor([*series(folder, "train/loss").values()], dtype=torch.float64)
    assert not torch.equal(losses, losses.bfloat16().double()), "losses are not rounded"


@long_form
def test_the_shipped_config_shards_a_gpt_in_bfloat16(text_file: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    reference = tmp_path / "reference"
    run_flags = f"--max_steps 2 --warmup_steps 1 --mixed_precision bf16 --dataset {text_file}"
    flags = [*TINY, *shlex.split(run_flags)]
    command = [*accelerate("fsdp2"), GPT, *flags, "--output_dir", str(sharded)]
    ended = run_forked(command).assert_ok()
    command = [*PYTHON, GPT, *flags, "--output_dir", str(reference)]
    run_forked(command).assert_ok()

    # Each of the two blocks, its norms, and the rest of the model.
    assert "FSDP2 over 2 processes in 5 units" in ended.out
    assert_trained_in_bfloat16(sharded)
    losses = series(sharded, "train/loss")
    assert losses == pytest.approx(series(reference, "train/loss"), rel=2e-3)


@long_form
def test_the_shipped_config_shards_an_adapter_in_bfloat16(
    bases: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(
        f"--model_name_or_path {bases}/tied --block_size 32 --tokenizer byte --lora_r 4 "
        f"--eval_fraction 0.1 --gradient_checkpointing --dataset {text_file} "
        f"--mixed_precision bf16 --output_dir {folder}"
    )
    two_steps = [*SIX_STEPS, *shlex.split("--max_steps 2 --warmup_steps 1")]

    ended = run_forked([*accelerate("fsdp2"), FINETUNE, *two_steps, *flags]).assert_ok()

    # Each of the two blocks, its norms, the tied embeddings, and the rest of the model.
    assert "FSDP2 over 2 processes in 6 units" in ended.out
    assert_trained_in_bfloat16(folder)
