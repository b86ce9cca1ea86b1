"""A run with a sharded model trains like a run on one process, and leaves the same checkpoints."""

import math
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
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
    Ended,
    accelerate,
    interrupt,
    long_form,
    metrics,
    read_json,
    run,
    series,
    torchrun,
)
from tests.system.sharded_ranks import Case

SCRIPT = "tests/system/sharded_ranks.py"
IN_FLOAT32 = ["--mixed_precision", "no"]
LAUNCHERS = {
    "one process": PYTHON,
    "DDP 2": accelerate("cpu_ddp"),
    "FSDP2 2": accelerate("fsdp2", *IN_FLOAT32),
    "FSDP2 4": accelerate("fsdp2", *IN_FLOAT32, "--num_processes", "4"),
    "HSDP 2x2": accelerate(
        "hsdp", *IN_FLOAT32, *shlex.split("--num_machines 1 --main_process_port 0")
    ),
}

# `sharded_ranks.Case` explains these names.
SHORT_CASES = [
    "gpt/1",
    "gpt/4",
    "gpt-each/4",
    "gpt-muon/1",
    "lfm2-muon/1",
    "llama/1",
    "llama/4",
    "mixtral/1",
    "base_of_experts-lora/1",
    "base-dora-grown/1",
    "base-lora-saved/1",
    "half-lora/1",
    "tied-lora-grown/1",
]
LONG_CASES = [
    *SHORT_CASES,
    "base-dora/1",
    "base-full/1",
    "base-lora/1",
    "base-lora/4",
    "gpt2base-dora/1",
    "lfm2/4",
    "tied-full-again/4",
    # Norms inside heads, joined projections, and fused heads.
    "qwen3/1",
    "phi3/1",
    "gpt_neox/1",
]
CASES = LONG_CASES if LONG else SHORT_CASES
STEPS = 5 if LONG else 3

TOKENS = {"bos_token_id": 256, "eos_token_id": 256, "vocab_size": 257}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **TOKENS,
}
GPT2 = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **TOKENS,
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make models to fine-tune. Their weights are in several files."""
    configs = {
        "base": AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=False),
        "tied": AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=True),
        "half": AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=False, dtype="bfloat16"),
        "gpt2base": AutoConfig.for_model("gpt2", **GPT2, tie_word_embeddings=True),
        "base_of_experts": AutoConfig.for_model(
            "mixtral", **LLAMA, tie_word_embeddings=False, num_local_experts=4
        ),
    }
    folder = tmp_path_factory.mktemp("bases")
    for name, config in configs.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name, max_shard_size="100KB")
    return folder


# --- steps


@dataclass
class CaseResult:
    """The results of a case in one layout. Lists have an item for each step."""

    case: Case
    folder: Path  # of the trained model
    losses: list[float]
    grad_norms: list[float]
    gradient_syncs: list[int]
    reduce_scatters: list[int]
    units: int
    has_same_parameters: bool
    local_bytes: int
    total_bytes: int
    is_tied: bool

    @property
    def local_share(self) -> float:
        return self.local_bytes / self.total_bytes

    def weights(self) -> torch.Tensor:
        tensors = dict(read_tensors(self.folder))
        return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


ResultsOf = Callable[[str], dict[str, CaseResult]]


def read_results(folder: Path) -> dict[str, CaseResult]:
    results = {}
    for name, values in read_json(folder / "results.json").items():
        case = Case.parse(name)
        results[name] = CaseResult(case=case, folder=folder / case.folder_name, **values)
    return results


@pytest.fixture(scope="module")
def results_of(bases: Path, shared_folder: Path) -> ResultsOf:
    """Return a function that trains all cases in a layout. All workers of pytest share one launch."""
    all_results = shared_folder / "sharding"
    all_results.mkdir(exist_ok=True)

    def results_of_layout(layout: str) -> dict[str, CaseResult]:
        folder = all_results / layout.replace(" ", "-")
        with FileLock(f"{folder}.lock"):
            if not (folder / "results.json").exists():
                arguments = [str(bases), str(folder), str(STEPS), *CASES]
                run_forked([*LAUNCHERS[layout], SCRIPT, *arguments], timeout=600).assert_ok()
        return read_results(folder)

    return results_of_layout


def largest_difference(values: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    pairs = zip(values, reference, strict=True)
    return max(abs(value / expected - 1) for value, expected in pairs)


LONG_LAYOUTS = ["HSDP 2x2", "FSDP2 4", "DDP 2"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    ["FSDP2 2", *(pytest.param(layout, marks=long_form) for layout in LONG_LAYOUTS)],
)
def test_every_layout_makes_the_steps_of_one_process(
    layout: str, results_of: ResultsOf, score: Callable[[str], None]
) -> None:
    references = results_of("one process")
    for name, result in results_of(layout).items():
        reference = references[name]
        weights = reference.weights()

        is_bfloat16 = result.case.model == "half"
        # The rounding of bfloat16 grows from step to step, most of all in the norm.
        compared_norms = 3 if is_bfloat16 else STEPS

        loss_difference = largest_difference(result.losses, reference.losses)
        norm_difference = largest_difference(
            result.grad_norms[:compared_norms], reference.grad_norms[:compared_norms]
        )
        weight_difference = float((result.weights() - weights).norm() / weights.norm())

        score(
            f"sharding: {layout}: {name}: losses {loss_difference:.1e}, "
            f"norms {norm_difference:.1e}, weights {weight_difference:.1e}"
        )
        tolerance_factor = 1000 if is_bfloat16 else 1
        assert loss_difference < 1e-5 * tolerance_factor, name
        assert norm_difference < 1e-4 * tolerance_factor, name
        assert weight_difference < 1e-4 * tolerance_factor, name
        assert len(set(result.losses)) == STEPS, "each step changes the loss"


@long_form
def test_shards_on_the_host_make_the_steps_of_one_process(
    bases: Path, tmp_path: Path, results_of: ResultsOf
) -> None:
    fsdp2 = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    config = tmp_path / "offload.yaml"
    config.write_text(fsdp2.replace("offload_params: false", "offload_params: true"))
    launcher = [str(BIN / "accelerate"), "launch", "--config_file", str(config), *IN_FLOAT32]
    folder = tmp_path / "results"
    arguments = [str(bases), str(folder), str(STEPS), "gpt/4", "llama/1", "base-lora/1"]

    run_forked([*launcher, SCRIPT, *arguments]).assert_ok()

    references = results_of("one process")
    for name, result in read_results(folder).items():
        assert result.losses == pytest.approx(references[name].losses, rel=1e-5)


# --- shards


def expected_units(case: Case) -> int:
    """Count the units of FSDP2: two blocks, embeddings with weights of their own, and the rest."""
    blocks = 2
    rest = 1
    if case.model in ("gpt", "lfm2"):
        embeddings = 0  # in the rest
    elif case.model in ("tied", "gpt2base"):
        embeddings = 1
    else:
        embeddings = 2
    return blocks + embeddings + rest


@pytest.mark.timeout(600)
def test_each_of_two_processes_has_half_of_the_model(results_of: ResultsOf) -> None:
    for name, result in results_of("FSDP2 2").items():
        assert math.isclose(result.local_share, 0.5, abs_tol=0.02), name
        assert result.has_same_parameters, f"{name}: the optimizer has other parameters"


@pytest.mark.timeout(600)
def test_tied_embeddings_stay_tied_in_one_unit(results_of: ResultsOf) -> None:
    for name, result in results_of("FSDP2 2").items():
        assert result.is_tied is (result.case.model in ("tied", "gpt2base")), name
        assert result.units == expected_units(result.case), name
    assert results_of("one process")["llama/1"].units == 0


@long_form
@pytest.mark.timeout(600)
def test_each_process_of_a_replica_has_half_of_the_model(results_of: ResultsOf) -> None:
    for name, result in results_of("HSDP 2x2").items():
        assert math.isclose(result.local_share, 0.5, abs_tol=0.03), name
        assert result.has_same_parameters, name


@pytest.mark.parametrize("name", ["gpt/1", "gpt/4", "llama/4"])
def test_gradients_are_reduced_once_a_step(name: str, results_of: ResultsOf) -> None:
    result = results_of("FSDP2 2")[name]
    assert result.gradient_syncs == [1] * STEPS
    assert result.reduce_scatters == [result.units] * STEPS


def test_gradients_are_reduced_in_each_micro_batch_with_sync_each_batch(
    results_of: ResultsOf,
) -> None:
    result = results_of("FSDP2 2")["gpt-each/4"]
    assert result.gradient_syncs == [4] * STEPS
    assert result.reduce_scatters == [4 * result.units] * STEPS


# --- models and checkpoints


@pytest.mark.parametrize("name", ["gpt/1", "llama/1", "mixtral/1"])
def test_transformers_loads_a_sharded_model(name: str, results_of: ResultsOf) -> None:
    folder = results_of("FSDP2 2")[name].folder

    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]

    model, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info.values()), loading_info
    elements = sum(tensor.numel() for _, tensor in read_tensors(folder))
    assert elements == model.num_parameters()


def test_a_sharded_adapter_is_one_file(results_of: ResultsOf) -> None:
    folder = results_of("FSDP2 2")["tied-lora-grown/1"].folder
    files = [path.name for path in folder.glob("*.safetensors")]
    assert files == ["adapter_model.safetensors"]


def test_a_sharded_model_can_be_written_in_another_dtype(results_of: ResultsOf) -> None:
    folder = results_of("FSDP2 2")["mixtral/1"].folder
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


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the observations of two ranks that write checkpoints together."""
    folder = tmp_path_factory.mktemp("team")
    run_forked([*torchrun(2), "tests/system/team_ranks.py", str(folder)]).assert_ok()
    return [read_json(folder / f"rank-{rank}.json") for rank in range(2)]


def test_each_rank_writes_its_shards_into_one_checkpoint(team: list[dict[str, Any]]) -> None:
    for observations in team:
        assert observations["is restored"]
        assert observations["files"] == [
            "step-00000001/model/model-00001-of-00002.safetensors",
            "step-00000001/model/model-00002-of-00002.safetensors",
            "step-00000001/optimizer/state-00001-of-00002.safetensors",
            "step-00000001/optimizer/state-00002-of-00002.safetensors",
        ]


def test_ranks_can_write_a_checkpoint_in_the_background(team: list[dict[str, Any]]) -> None:
    for observations in team:
        assert observations["is restored after a save in the background"]


def test_a_full_disk_of_one_rank_is_an_error_on_all_ranks(team: list[dict[str, Any]]) -> None:
    for observations in team:
        assert "No space left on device" in observations["error of a full disk"]
        assert "older checkpoints are untouched" in observations["error of a full disk"]
        checkpoints = observations["checkpoints after a full disk"]
        assert checkpoints == ["step-00000001", "step-00000002"]


def test_a_rank_that_sees_no_shared_folder_sends_its_shards(team: list[dict[str, Any]]) -> None:
    for observations in team:
        assert observations["is restored from one disk"]
        assert observations["files on one disk"] == [
            "step-00000004/model/model.safetensors",
            "step-00000004/optimizer/state.safetensors",
        ]


def test_a_bug_on_one_rank_ends_all_ranks_and_has_its_own_traceback(
    team: list[dict[str, Any]],
) -> None:
    first, second = team
    elsewhere = "FailedElsewhereError: rank 1 has failed: ValueError: bad number"
    assert first["error of a bug"].startswith(elsewhere)
    assert second["error of a bug"] == "ValueError: bad number"
    assert second["raised in"] == "fail_on_rank_1"


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


def assert_same_run(folder: Path, reference: Path) -> float:
    """Assert that a run had the rows and the losses of another one, up to rounding.

    Returns:
        The largest relative difference between their losses.
    """
    assert (folder / "rows.jsonl").read_text() == (reference / "rows.jsonl").read_text()

    losses = series(folder, "train/loss")
    expected_losses = series(reference, "train/loss")
    assert losses == pytest.approx(expected_losses, rel=1e-5)

    weight_norms = series(folder, "train/weight_norm")
    expected_norms = series(reference, "train/weight_norm")
    assert weight_norms == pytest.approx(
        {step: expected_norms[step] for step in weight_norms}, rel=1e-5
    )

    batches = {line["step"]: line.get("batch") for line in metrics(folder)}
    expected_batches = {line["step"]: line.get("batch") for line in metrics(reference)}
    assert batches == {step: expected_batches[step] for step in batches}

    assert find_fault(folder / LAST_CHECKPOINT) is None
    for model in (folder / LAST_CHECKPOINT / "model", folder / "model"):
        assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0

    return largest_difference(
        [losses[step] for step in sorted(losses)],
        [expected_losses[step] for step in sorted(losses)],
    )


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
def test_a_run_resumes_in_any_layout(
    text_file: Path, uninterrupted: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
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
    difference = assert_same_run(folder, uninterrupted)
    score(f"sharding: resumed in {', '.join(layouts)}: losses differ by {difference:.1e}")


# --- the shipped config


def assert_trained_in_bfloat16(folder: Path) -> None:
    [start] = read_json(folder / "run.json")["starts"]
    assert start["processes"] == 2
    assert start["sharded"] == "1x2"
    assert start["mixed_precision"] == "bf16"

    losses = torch.tensor([*series(folder, "train/loss").values()], dtype=torch.float64)
    assert not torch.equal(losses, losses.bfloat16().double()), "losses are not rounded"


def train_two_steps(launcher: list[str], text_file: Path, folder: Path) -> Ended:
    flags = f"--max_steps 2 --warmup_steps 1 --dataset {text_file} --output_dir {folder}"
    return run_forked([*launcher, GPT, *TINY, *shlex.split(flags)]).assert_ok()


def test_the_shipped_config_shards_a_gpt_in_bfloat16(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    ended = train_two_steps(accelerate("fsdp2"), text_file, folder)

    # Each of the two blocks, its norms, and the rest of the model.
    assert "FSDP2 over 2 processes in 5 units" in ended.out
    assert_trained_in_bfloat16(folder)


@long_form
def test_the_shipped_config_has_the_losses_of_one_process(text_file: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    reference = tmp_path / "reference"

    train_two_steps(accelerate("fsdp2"), text_file, sharded)
    flags = f"--max_steps 2 --warmup_steps 1 --dataset {text_file} --output_dir {reference}"
    one_process = accelerate("cpu", "--mixed_precision", "bf16")
    run([*one_process, GPT, *TINY, *shlex.split(flags)]).assert_ok()

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
        f"--output_dir {folder}"
    )
    two_steps = [*SIX_STEPS, *shlex.split("--max_steps 2 --warmup_steps 1")]

    ended = run_forked([*accelerate("fsdp2"), FINETUNE, *two_steps, *flags]).assert_ok()

    # Each of the two blocks, its norms, the tied embeddings, and the rest of the model.
    assert "FSDP2 over 2 processes in 6 units" in ended.out
    assert_trained_in_bfloat16(folder)
