"""A run whose model is sharded over the processes is the same run, and leaves the same checkpoints."""

import math
import signal
from collections.abc import Callable
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
    PYTHON,
    ROOT,
    TINY,
    accelerate,
    long_form,
    metrics,
    read_json,
    run,
    series,
    torchrun,
)
from tests.launching import LONG as LONG_FORM
from tests.system.test_resume import interrupt

SCRIPT = "tests/system/sharded_ranks.py"
FLOAT32 = ("--mixed_precision", "no")
LAUNCHERS = {
    "one process": [*PYTHON],
    "DDP 2": accelerate("cpu_ddp"),
    "FSDP2 2": accelerate("fsdp2", *FLOAT32),
    "FSDP2 4": accelerate("fsdp2", *FLOAT32, "--num_processes", "4"),
    "HSDP 2x2": accelerate("hsdp", *FLOAT32, "--num_machines", "1", "--main_process_port", "0"),
}
TABLE = [
    f"{case}/{accumulation}" for case in ("gpt", "llama", "base-lora") for accumulation in (1, 4)
]
MORE = [
    "gpt-each/4",
    "gpt-muon/1",
    "base-full/1",
    "base-dora/1",
    "tied-lora-grown/1",
    "base-dora-grown/1",
    "base-lora-saved/1",
]
MORE += [
    "tied-full-again/4",
    "gpt2base-dora/1",
    "mixtral/1",
    "base_of_experts-lora/1",
    "half-lora/1",
    "lfm2/4",
    "lfm2-muon/1",
]
SHORT = {
    "FSDP2 2": [*TABLE[:4], "gpt-each/4", "gpt-muon/1", "tied-lora-grown/1", "base-dora-grown/1"]
}
SHORT["FSDP2 2"] += ["mixtral/1", "base_of_experts-lora/1", "half-lora/1", "lfm2-muon/1"]
SHORT["FSDP2 2"] += ["base-lora-saved/1"]
# With norms inside heads, with outputs that are joined, and with fused heads.
JOINED = ["qwen3/1", "phi3/1", "gpt_neox/1"]
SHORT |= {"one process": sorted({case for cases in SHORT.values() for case in cases})}
UPDATES = 5 if LONG_FORM else 3


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as others publish them, in several files."""
    folder = tmp_path_factory.mktemp("bases")
    ends = {"bos_token_id": 256, "eos_token_id": 256, "vocab_size": 257}
    llama = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    llama |= {"num_key_value_heads": 2, "max_position_embeddings": 64, **ends}
    gpt2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, **ends}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    for name, kind, sizes, tied in (
        ("base", "llama", llama, False),
        ("tied", "llama", llama, True),
        ("gpt2base", "gpt2", gpt2, True),
        ("base_of_experts", "mixtral", {**llama, "num_local_experts": 4}, False),
        ("half", "llama", {**llama, "dtype": "bfloat16"}, False),
    ):
        config = AutoConfig.for_model(kind, tie_word_embeddings=tied, **sizes)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(
            folder / name, max_shard_size="100KB"
        )
    return folder


@pytest.fixture(scope="module")
def found(bases: Path, shared_folder: Path) -> Callable[[str], dict[str, Any]]:
    """Readings of all cases under one launcher: launched once, whoever of pytest's workers asks first."""
    folder, known = shared_folder / "sharding", {}
    folder.mkdir(exist_ok=True)

    def find(name: str) -> dict[str, Any]:
        if name not in known:
            cases = [*TABLE, *MORE, *JOINED]
            if not LONG_FORM:
                cases = SHORT.get(name, TABLE)
            place = folder / name.replace(" ", "-")
            with FileLock(f"{place}.lock"):
                if not (place / "found.json").exists():
                    words = [*LAUNCHERS[name], SCRIPT, str(bases), str(place), str(UPDATES), *cases]
                    run_forked(words, timeout=600).assert_ok()
            known[name] = read_json(place / "found.json")
            for case, readings in known[name].items():
                readings["folder"] = place / case.replace("/", "-")
                tensors = dict(read_tensors(readings["folder"]))
                readings["weights"] = torch.cat(
                    [tensors[name].double().flatten() for name in sorted(tensors)]
                )
        return known[name]

    return find


def apart(readings: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Largest relative deviations."""
    pairs = {key: zip(readings[key], reference[key], strict=True) for key in ("losses", "norms")}
    weights = (readings["weights"] - reference["weights"]).norm() / reference["weights"].norm()
    return {key: max(abs(a / b - 1) for a, b in both) for key, both in pairs.items()} | {
        "weights": float(weights)
    }


@pytest.fixture(scope="module")
def offloading(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = (ROOT / "accelerate_configs" / "fsdp2.yaml").read_text()
    path = tmp_path_factory.mktemp("config") / "offload.yaml"
    path.write_text(config.replace("offload_params: false", "offload_params: true"))
    return path


@long_form
def test_parts_that_live_on_the_host_are_trained_alike(
    offloading: Path, bases: Path, tmp_path: Path, found
) -> None:
    command = [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        str(offloading),
        *FLOAT32,
        SCRIPT,
        str(bases),
    ]
    run_forked(
        [*command, str(tmp_path / "found"), str(UPDATES), "gpt/4", "llama/1", "base-lora/1"]
    ).assert_ok()
    for case, readings in read_json(tmp_path / "found" / "found.json").items():
        assert readings["losses"] == pytest.approx(found("one process")[case]["losses"], rel=1e-5)


OTHERS = ["HSDP 2x2", "FSDP2 4", "DDP 2"]
LAYOUTS = ["FSDP2 2", *(pytest.param(name, marks=long_form) for name in OTHERS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_makes_the_updates_of_one_process(
    name: str, found, score: Callable[[str], None]
) -> None:
    for case, readings in found(name).items():
        difference = apart(readings, found("one process")[case])
        score(
            f"sharding: {name}: {case}: "
            + ", ".join(f"{key} {value:.1e}" for key, value in difference.items())
        )
        # The base of "half" computes in bfloat16.
        rounding = 1000 if case.startswith("half") else 1
        assert difference["losses"] < 1e-5 * rounding, case
        assert difference["norms"] < 1e-4 * rounding, case
        assert difference["weights"] < 1e-4 * rounding, case
        assert len(set(readings["losses"])) == UPDATES


@pytest.mark.timeout(600)
def test_each_process_holds_its_part_of_what_is_tied_and_of_nothing_twice(found) -> None:
    for case, readings in found("FSDP2 2").items():
        assert math.isclose(readings["held"] / readings["all"], 0.5, abs_tol=0.02), case
        assert readings["same_parameters"], (
            f"{case}: the optimizer has other parameters than the model"
        )
        tied = case.startswith(("tied", "gpt2base"))
        blocks, ends = 2, 0 if case.startswith(("gpt-", "gpt/", "lfm2")) else 1 if tied else 2
        assert readings["units"] == blocks + ends + 1, case
        assert readings.get("tied", False) is tied, case
    assert found("one process")["llama/1"]["units"] == 0
    if LONG_FORM:
        for case, readings in found("HSDP 2x2").items():
            assert math.isclose(readings["held"] / readings["all"], 0.5, abs_tol=0.03), case
            assert readings["same_parameters"], case


@pytest.mark.parametrize("case", ["gpt/1", "llama/1", "tied-lora-grown/1", "mixtral/1"])
def test_what_a_sharded_model_leaves_is_what_others_load(case: str, found) -> None:
    readings = found("FSDP2 2")[case]
    files = {path.name for path in readings["folder"].glob("*.safetensors")}
    if "lora" in case:
        assert files == {"adapter_model.safetensors"}
        return
    assert files == {f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    model, about = AutoModelForCausalLM.from_pretrained(
        readings["folder"], output_loading_info=True
    )
    assert not any(about.values()), about
    assert (
        sum(tensor.numel() for _, tensor in read_tensors(readings["folder"]))
        == model.num_parameters()
    )


def test_a_sharded_model_is_finished_in_another_dtype(found) -> None:
    folder = found("FSDP2 2")["mixtral/1"]["folder"]
    trained = dict(read_tensors(folder))
    rounded = folder.with_name("mixtral-1-bfloat16")
    finished = dict(read_tensors(rounded))
    assert trained.keys() == finished.keys()
    for name, tensor in trained.items():
        assert torch.equal(finished[name], tensor.bfloat16()), name
        assert finished[name].dtype == torch.bfloat16
    index = read_json(rounded / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in finished.values())
    assert AutoModelForCausalLM.from_pretrained(rounded).dtype == torch.bfloat16


def test_gradients_are_reduced_once_an_update_or_in_each_micro_batch_where_asked(found) -> None:
    readings = found("FSDP2 2")
    for case in ("gpt/1", "gpt/4", "llama/4"):
        assert set(readings[case]["syncs"]) == {1}
        assert set(readings[case]["scattered"]) == {readings[case]["units"]}
    assert set(readings["gpt-each/4"]["syncs"]) == {4}
    assert set(readings["gpt-each/4"]["scattered"]) == {4 * readings["gpt-each/4"]["units"]}


def test_processes_write_a_checkpoint_together_or_not_at_all(tmp_path: Path) -> None:
    run_forked([*torchrun(2), "tests/system/team_ranks.py", str(tmp_path)]).assert_ok()
    for rank in (0, 1):
        seen = read_json(tmp_path / f"found-{rank}.json")
        assert seen["gives back"]
        assert seen["in the background"]
        assert seen["files"] == [
            f"checkpoints/step-00000001/{name}-0000{part}-of-00002.safetensors"
            for name in ("model/model", "optimizer/state")
            for part in (1, 2)
        ]
        assert (
            "No space left on device" in seen["full"]
        )  # on both, though it was one of them that failed
        assert "older checkpoints are untouched" in seen["full"]
        assert seen["left"] == ["step-00000001", "step-00000002"]
        assert seen["one disk"]
        assert seen["files on one disk"] == ["model.safetensors", "state.safetensors"]

    bug_of_other, _ = read_json(tmp_path / "found-0.json")["bug"]
    assert bug_of_other.startswith(
        "FailedElsewhereError: rank 1 has failed: ValueError: bad number"
    )
    assert read_json(tmp_path / "found-1.json")["bug"] == ["ValueError: bad number", "action"]


HALF, WHOLE = (30, 60) if LONG_FORM else (8, 16)
LONG = [
    *TINY,
    "--max_steps",
    str(WHOLE),
    "--save_steps",
    str(HALF),
    "--dropout",
    "0.1",
    "--log_rows",
]
LONG += ["--eval_steps", str(HALF)]
WRITING = ["--sample_prompts", "The"]


@pytest.fixture(scope="module")
def uninterrupted(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_forked(
        [*PYTHON, GPT, *LONG, *WRITING, "--dataset", str(text_file), "--output_dir", str(folder)]
    ).assert_ok()
    return folder


def assert_went_on(folder: Path, reference: Path) -> float:
    """Assert that rows and losses are those of another run; return the largest difference of a loss."""
    ledger, expected = (
        (path / "rows.jsonl").read_text().splitlines() for path in (folder, reference)
    )
    assert ledger == expected
    losses, others = series(folder, "train/loss"), series(reference, "train/loss")
    assert losses == pytest.approx(others, rel=1e-5)
    weights, expected = (series(path, "train/weight_norm") for path in (folder, reference))
    assert weights == pytest.approx({step: expected[step] for step in weights}, rel=1e-5)
    read, batches = (
        {line["step"]: line.get("batch") for line in metrics(path)} for path in (folder, reference)
    )
    assert read == {step: batches[step] for step in read}
    last = folder / "checkpoints" / f"step-{WHOLE:08d}"
    assert find_fault(last) is None
    for model in (last / "model", folder / "model"):
        assert AutoModelForCausalLM.from_pretrained(model).num_parameters() > 0
    return max(abs(loss / others[step] - 1) for step, loss in losses.items())


@pytest.mark.parametrize("layout", ["FSDP2 2", pytest.param("HSDP 2x2", marks=long_form)])
def test_a_run_goes_on_where_its_model_is_sharded(
    layout: str, text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    flags = [
        GPT,
        *LONG,
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "run"),
        "--async_save",
    ]
    begun = ["--resume_from_checkpoint", str(uninterrupted / "checkpoints" / f"step-{HALF:08d}")]
    ended = run_forked([*LAUNCHERS[layout], *flags, *begun, *WRITING]).assert_ok()
    assert_went_on(tmp_path / "run", uninterrupted)
    _, _, shown = ended.out.partition(f"--- a sample of {tmp_path / 'run' / 'model'} ")
    assert len(shown.partition("\n")[2].partition("\n---")[0]) > 10, "all ranks write the sample"
    written, expected = (path / "samples.jsonl" for path in (tmp_path / "run", uninterrupted))
    assert written.read_text() == expected.read_text()
    sharded = dict(read_tensors(tmp_path / f"run/checkpoints/step-{WHOLE:08d}/optimizer"))
    whole = dict(read_tensors(uninterrupted / f"checkpoints/step-{WHOLE:08d}/optimizer"))
    assert sharded.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-2, atol=1e-6)


@long_form
def test_a_run_goes_on_under_any_layout(
    text_file: Path, uninterrupted: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    folder, layouts = (
        tmp_path / "run",
        ("FSDP2 4", "DDP 2", "HSDP 2x2", "one process", "FSDP2 2"),
    )
    flags = [GPT, *LONG, "--dataset", str(text_file), "--output_dir", str(folder)]
    commands = [[*LAUNCHERS[name], *flags] for name in layouts]
    for place, command in enumerate(commands[:-1]):
        interrupt(command, folder, signal.SIGTERM, 9 * (place + 1))
    run_forked(commands[-1]).assert_ok()
    starts = read_json(folder / "run.json")["starts"]
    assert [start["sharded"] for start in starts] == ["1x4", None, "2x2", None, "1x2"]
    assert all(start["step"] > 0 for start in starts[1:])
    worst = assert_went_on(folder, uninterrupted)
    score(f"sharding: saved and loaded under {', '.join(layouts)}: losses differ by {worst:.1e}")


@pytest.mark.parametrize("recipe", [GPT, FINETUNE])
def test_the_shipped_config_shards_in_bfloat16(
    recipe: str, text_file: Path, bases: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [*TINY, "--max_steps", "2", "--warmup_steps", "1"]
    if recipe == FINETUNE:
        flags = [
            "--model_name_or_path",
            str(bases / "tied"),
            "--block_size",
            "32",
            *TINY[10:],
            "--max_steps",
            "2",
            "--warmup_steps",
            "1",
        ]
        flags += [
            "--lora_r",
            "4",
            "--tokenizer",
            "byte",
            "--eval_fraction",
            "0.1",
            "--gradient_checkpointing",
        ]
    command = [
        *accelerate("fsdp2"),
        recipe,
        *flags,
        "--dataset",
        str(text_file),
        "--output_dir",
        str(folder),
    ]
    ended = run_forked(command).assert_ok()
    blocks, ends = (
        2 * 2,
        1 if recipe == GPT else 2,
    )  # a block and its norms; what is left; and the shared matrix
    assert f"FSDP2 over 2 processes in {blocks + ends} units" in ended.out
    start = read_json(folder / "run.json")["starts"][0]
    assert start["processes"] == 2
    assert start["sharded"] == "1x2"
    assert start["mixed_precision"] == "bf16"
    losses = series(folder, "train/loss")
    assert any(
        loss != float(torch.tensor(loss).bfloat16()) for loss in losses.values()
    )  # nothing has rounded it
    if recipe == GPT and LONG_FORM:
        alone = [
            *accelerate("cpu", "--mixed_precision", "bf16"),
            recipe,
            *flags,
            "--dataset",
            str(text_file),
        ]
        run([*alone, "--output_dir", str(tmp_path / "alone")]).assert_ok()
        assert losses == pytest.approx(series(tmp_path / "alone", "train/loss"), rel=2e-3)
