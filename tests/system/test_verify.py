"""The proof that a run is the same on any layout, and that the proof can fail."""

import json
import shutil
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    ROOT,
    SMALL_LLAMA,
    TINY,
    long_form,
    read_json,
    run,
    torchrun,
    write_text,
)

VERIFY = [str(BIN / "python"), "-m", "llmtrain", "verify", "layout"]


def test_every_planted_bug_of_the_update_shows(tmp_path: Path) -> None:
    run_forked([*torchrun(2), "tests/system/controls.py", str(tmp_path / "found.json")]).assert_ok()
    found = read_json(tmp_path / "found.json")
    assert found.pop("nothing planted") == [[], []]
    for bug, by_rank in found.items():
        assert any(by_rank), f"{bug} went unnoticed"
        assert "weights" in by_rank[1], bug
    (drift,) = [fault for fault in found["one weight perturbed on rank 1"][0] if "drifted" in fault]
    assert "transformer.wte.weight of rank 1 differs from rank 0's" in drift
    assert any("drifted" in fault for fault in found["a missing sync"][0])
    assert len(found) == 7


@long_form  # the short form is the bitwise run of test_kills, on 1 and 2 processes
@pytest.mark.parametrize(("architecture", "layouts"), [("lfm2", "2,8"), ("gpt2", "1,4")])
def test_the_same_bits_on_any_number_of_processes_with_dropout(
    architecture: str, layouts: str, text_file: Path
) -> None:
    flags = [
        *TINY,
        "--per_device_train_batch_size",
        "1",
        "--dropout",
        "0.2",
        "--bitwise",
        "--dataset",
        str(text_file),
    ]
    command = [
        *VERIFY,
        "--layouts",
        layouts,
        "--steps",
        "3",
        "--json",
        GPT,
        *flags,
        "--architecture",
        architecture,
    ]
    ended = run(command, timeout=600).assert_ok()
    found = json.loads(ended.out)
    assert (found["same"], found["failures"]) == (True, [])
    assert found["others"][-1]["layout"] == f"{layouts[-1]} processes"
    assert len({found["reference"]["digest"], *(other["digest"] for other in found["others"])}) == 1
    assert all(other["same_rows"] and other["weights"] == 0 for other in found["others"])


@long_form
def test_a_llama_of_hugging_faces_too_has_the_same_bits_on_text(text_file: Path) -> None:
    command = [
        *VERIFY,
        "--layouts",
        "1,4",
        "--steps",
        "4",
        FINETUNE,
        *SMALL_LLAMA,
        "--dataset",
        str(text_file),
    ]
    ended = run(
        [*command, "--bitwise", "--per_device_train_batch_size", "1"], timeout=600
    ).assert_ok()
    assert "passed: the same run" in ended.out
    assert len({line.split()[-1] for line in ended.out.splitlines()[1:-1]}) == 1


@long_form
@pytest.mark.parametrize(("change", "limit"), [("mixed_precision: bf16", 1e-2), ("dynamo", 1e-5)])
def test_bf16_and_compiled_runs_agree_on_two_layouts(
    change: str, limit: float, text_file: Path, tmp_path: Path
) -> None:
    if change == "dynamo" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    config = (ROOT / "accelerate_configs" / "cpu_ddp.yaml").read_text()
    dynamo = "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    plain = "mixed_precision: 'no'"
    assert plain in config
    (tmp_path / "config.yaml").write_text(
        config + dynamo if change == "dynamo" else config.replace(plain, change)
    )
    command = [
        *VERIFY,
        "--config_file",
        str(tmp_path / "config.yaml"),
        "--layouts",
        "1x4x2,2x2x2",
        "--steps",
        "4",
    ]
    ended = run([*command, GPT, *TINY, "--dataset", str(text_file)], timeout=230).assert_ok()
    _, rows, *_, weights, _ = ended.out.splitlines()[2].split()
    assert rows == "same"
    assert 0 < float(weights) < limit


@long_form
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_in_the_same_bits_on_3_processes_and_fails_without_its_mending(
    text_file: Path,
) -> None:
    resume = [*VERIFY[:-1], "resume", "--steps", "30", "--layouts"]
    wide = [*TINY, "--n_embd", "128", "--dataset", str(text_file)]  # more than one bucket
    wide += ["--global_batch_size", "12"]
    ended = run([*resume, "3", GPT, *wide], timeout=300).assert_ok()
    assert "passed: the same run" in ended.out
    ended = run(
        [*resume, "3", "tests/system/planted.py", *wide],
        env={"PLANTED": "buckets that are not settled"},
        timeout=300,
    )
    assert ended.status == 1
    assert "killed, resumed: weights or optimizer differ in some bits" in ended.out


@long_form
def test_a_killed_llama_with_dropout_goes_on_in_the_same_bits(text_file: Path) -> None:
    command = [*VERIFY[:-1], "resume", "--steps", "60", "--layouts", "1", FINETUNE, *SMALL_LLAMA]
    dropout = ["--config_overrides", f"{SMALL_LLAMA[1]},attention_dropout=0.1"]
    assert (
        "passed: the same run"
        in run([*command, *dropout, "--dataset", str(text_file)]).assert_ok().out
    )


@long_form
def test_without_it_the_layouts_agree_but_for_rounding(text_file: Path) -> None:
    command = [
        *VERIFY,
        "--layouts",
        "1x4x2,1x1x8",
        "--steps",
        "4",
        GPT,
        *TINY,
        "--dataset",
        str(text_file),
    ]
    assert "passed: the same run" in run(command).assert_ok().out


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        pytest.param("a mean of means", "2 processes: gradient norm differs by", marks=long_form),
        pytest.param(
            "a missing sync",
            "keeps other values on rank 1 than on rank 0",  # the optimizer, before weights drift
            marks=long_form,
        ),
        pytest.param(
            "a sync in every micro-batch",
            "2 processes: gradients are reduced 2 times in a step",
            marks=long_form,
        ),
        pytest.param(
            "a scheduler stepped per rank",
            "2 processes: different learning rate from step 3 on",
            marks=long_form,
        ),
        pytest.param(
            "unshifted token counts",
            "264 target tokens were counted up to step 1, but its rows have 256",
            marks=long_form,
        ),
        pytest.param(
            "a rank reading another's rows",
            "2 processes: different rows from step 2 on",
            marks=long_form,
        ),
        pytest.param(
            "one weight perturbed on rank 1",
            "2 processes: replicas drifted: model.embed_tokens.weight of rank 1",
            marks=long_form,
        ),
    ],
)
def test_a_planted_bug_fails_the_verification_which_names_it(
    bug: str, says: str, tmp_path: Path
) -> None:
    short = write_text(
        tmp_path / "text.txt", sentences=12
    )  # 17 rows: the third batch is one row and padding
    flags = [*TINY, "--dataset", str(short)]
    ended = run(
        [*VERIFY, "--layouts", "2", "--steps", "3", "tests/system/planted.py", *flags],
        env={"PLANTED": bug},
    )
    assert ended.status == 1, ended.out + ended.err
    assert says in ended.out
    assert ended.out.splitlines()[-1] == "FAILED: not the same run"


@long_form
def test_what_cannot_be_verified_is_one_line(text_file: Path) -> None:
    for words, says in (
        (["--layouts", "2y3", GPT], "--layouts 2y3: write a number of processes"),
        (["--layouts", "1x2x2,2x2x2", GPT], "must have the same global batch"),
        (["--config_file", "README.md", GPT], "README.md is not an accelerate config"),
        (["--layouts", "2x2x2", GPT], "name at least two layouts"),
        (
            ["--config_file", "accelerate_configs/cpu.yaml", GPT],
            "starts one process (distributed_type: NO)",
        ),
        (["no/such/recipe.py"], "no/such/recipe.py is not a file"),
        ([GPT, *TINY, "--n_head", "3", "--dataset", str(text_file)], "--n_head 3 does not divide"),
    ):
        ended = run([*VERIFY, *words])
        assert ended.status == 2
        assert says in ended.err
        assert len(ended.err.strip().splitlines()) == 1
