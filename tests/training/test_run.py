"""A run chooses its folder, resumes or extends other runs, and records what happened."""

import contextlib
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.data.config import DataConfig
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.model import ModelBundle
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.record import resume
from llmtrain.record.run_record import start_times
from llmtrain.record.tracking import MetricsLog
from llmtrain.training import opening, run_state
from llmtrain.training.opening import open_run
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.rows import tokenize
from llmtrain.training.run import Run, RunSummary
from llmtrain.training.settings import LogConfig, OptimConfig, RunConfig, Settings
from tests.engines import engine_of, finish
from tests.launching import metrics, read_json
from tests.record.checkpoint_files import Files
from tests.waiting import wait_until

FINGERPRINT = {"model": {"width": 4}, "data": "abc", "seed": 0, "optimizer": {"learning_rate": 0.1}}
WITHOUT_CHECKPOINT = r"no checkpoint in .* is intact"


class CrashError(Exception):
    """Stands for a crash."""


@dataclasses.dataclass
class SmallModel:
    """A model with an optimizer, as a run saves and restores them."""

    model: nn.Module
    engine: ReplicatedEngine
    optimizer_state: OptimizerState

    def save(self, run: Run, step: int) -> None:
        run.status.step = step
        run.status.tokens = 100 * step
        run_state.save(run, self.engine, self.optimizer_state)

    def restore(self, run: Run) -> None:
        run_state.restore(run, self.engine, self.optimizer_state)


@pytest.fixture
def small_model(accelerator: Accelerator) -> SmallModel:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    return SmallModel(
        model=model,
        engine=engine_of(accelerator, model),
        optimizer_state=OptimizerState(model, optimizer.optimizer),
    )


@pytest.fixture(scope="module")
def rows() -> Tokenized:
    texts = ["a text", "another text", "and more of it"]
    return tokenize(DataConfig(tokenizer="byte"), 8, records=lambda: iter(texts))


@pytest.fixture
def start(
    accelerator: Accelerator, tmp_path: Path, rows: Tokenized, monkeypatch: pytest.MonkeyPatch
):
    """A function that opens a run with the output folder ``tmp_path/run``.

    It takes the fingerprint of the run, and further flags.
    """

    def start(
        fingerprint: dict[str, Any] = FINGERPRINT,
        **flags: Any,
    ):
        monkeypatch.setattr(opening, "run_fingerprint", lambda *_: fingerprint)
        defaults = {"output_dir": str(tmp_path / "run"), "report_to": ["none"]}
        settings = Settings(
            data=DataConfig(), optim=OptimConfig(seed=3), run=RunConfig(**(defaults | flags))
        )
        model = nn.Linear(2, 2)
        return open_run(
            accelerator,
            settings,
            rows,
            ModelBundle(model, Files()),
            torch.optim.SGD(model.parameters()),
        )

    return start


@pytest.fixture
def train(start, small_model: SmallModel):
    """A function that starts a run, saves and logs at steps, and lets it finish or crash.

    It returns which folder was used and from which step, such as "run-2 from step 10". Further
    arguments are those of ``start``.
    """

    def train(*, steps: Sequence[int] = (), crash: bool = False, **arguments: Any) -> str:
        with contextlib.suppress(CrashError), start(**arguments) as run:
            first_step = run.step
            for step in steps:
                small_model.save(run, step)
                run.log({"train/loss": 1.0})
            if crash:
                raise CrashError("out of luck")
            finish(run, small_model.model)
        return f"{run.folder.name} from step {first_step}"

    return train


def status_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / "status.json")


def change_status(folder: Path, **changes: Any) -> None:
    (folder / "status.json").write_text(json.dumps(status_of(folder) | changes))


def record_of(folder: Path) -> dict[str, Any]:
    return read_json(folder / "run.json")


def begin_later(folder: Path) -> None:
    """Let the last start of a run be later than those of all other runs."""
    record = record_of(folder)
    record["starts"][-1]["time"] = "2999-01-01T00:00:00+0000"
    (folder / "run.json").write_text(json.dumps(record))


def logged_steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in metrics(folder)]


def saved_steps(folder: Path) -> list[int]:
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    return sorted(int(name.removeprefix("step-")) for name in names)


# --- new runs and resumed runs


def test_the_same_command_uses_the_next_free_name_or_resumes_the_unfinished_run(train) -> None:
    assert train() == "run from step 0"
    assert train() == "run-2 from step 0"
    assert train(steps=[5], crash=True) == "run-3 from step 0"
    assert train(resume_from_checkpoint="never", steps=[6], crash=True) == "run-4 from step 0"
    assert train() == "run-3 from step 5"


def test_an_unfinished_run_resumes_from_its_newest_checkpoint(train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(steps=[10, 20], crash=True) == "run from step 0"
    assert status_of(folder)["state"] == "failed"
    assert status_of(folder)["reason"] == "out of luck"

    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 25, "train/loss": 9}\n{"step": 26, "tr')
    assert train(steps=[30]) == "run from step 20"

    assert logged_steps(folder) == [10, 20, 30]
    assert [start["step"] for start in record_of(folder)["starts"]] == [0, 20]
    assert status_of(folder)["state"] == "finished"
    assert train() == "run-2 from step 0"


def test_an_unfinished_run_without_a_checkpoint_starts_again_in_its_folder(train) -> None:
    train(crash=True)
    assert train() == "run from step 0"


def test_a_run_without_a_readable_status_resumes(train, tmp_path: Path) -> None:
    status = tmp_path / "run/status.json"
    train(steps=[10], crash=True)
    status.write_text("{")
    assert train(steps=[20], crash=True) == "run from step 10"
    status.unlink()
    assert train() == "run from step 20"


def test_files_that_are_not_a_run_are_left_alone(train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("mine")

    assert train() == "run-2 from step 0"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


# --- several processes


def test_a_run_of_another_process_is_left_alone(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(resume, "_WAIT_SECONDS", 0.1)
    train(steps=[10], crash=True)

    with filelock.FileLock(tmp_path / "run/.lock"):
        assert train() == "run-2 from step 0"

    message = "is in use; waiting up to 0.1 s for that run to end before using another folder"
    assert message in capsys.readouterr().out


def test_a_run_whose_process_is_just_ending_is_waited_for(train, tmp_path: Path) -> None:
    """A launcher that is killed leaves workers that save. A new start should resume their run."""
    train(steps=[10], crash=True)
    lock = filelock.FileLock(tmp_path / "run/.lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.5, lock.release).start()

    assert train() == "run from step 10"


def test_a_folder_that_appears_while_a_start_chooses_is_not_used(
    train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This matters if the file system keeps no locks."""
    real_is_free = resume.is_free

    def is_free_but_then_taken(folder: Path) -> bool:
        is_free = real_is_free(folder)
        (tmp_path / "run").mkdir(exist_ok=True)
        return is_free

    monkeypatch.setattr(resume, "is_free", is_free_but_then_taken)

    assert train() == "run-2 from step 0"


def test_a_run_whose_folder_was_taken_over_saves_nothing_more(
    start, small_model: SmallModel, tmp_path: Path
) -> None:
    """This matters if the file system keeps no locks between machines."""
    folder = tmp_path / "run"
    with start() as run:
        small_model.save(run, 1)
        change_status(folder, start_id="of another run")

        message = "another run has taken over this folder, so no checkpoint was saved"
        with pytest.raises(UserError, match=message):
            small_model.save(run, 2)

    assert saved_steps(folder) == [1]
    assert status_of(folder)["start_id"] == "of another run", "its status is not overwritten"


# --- lost checkpoints


def damage_checkpoints(folder: Path) -> None:
    for path in folder.glob("checkpoints/step-*/model/model.safetensors"):
        path.write_bytes(b"")


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_run_without_an_intact_checkpoint_does_not_start_over(
    restarts: str, train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    train(steps=[10, 20], crash=True)
    damage_checkpoints(tmp_path / "run")

    for _attempt in range(2):
        with pytest.raises(UserError, match=WITHOUT_CHECKPOINT):
            train()
    assert (tmp_path / "run/checkpoints/damaged-step-00000020").is_dir()


# --- runs that extend others


def test_a_run_that_extends_another_one_begins_with_a_copy_of_its_log(
    train, tmp_path: Path
) -> None:
    train(steps=[10, 20])
    (tmp_path / "run/samples.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    checkpoint = str(tmp_path / "run/checkpoints/step-00000010")

    assert train(steps=[30], resume_from_checkpoint=checkpoint) == "run-2 from step 10"
    assert logged_steps(tmp_path / "run-2") == [10, 30]
    assert (tmp_path / "run-2/samples.jsonl").read_text() == '{"step": 10}\n'
    assert logged_steps(tmp_path / "run") == [10, 20], "the extended run is unchanged"

    extended = record_of(tmp_path / "run")
    assert extended["extends"] is None
    assert record_of(tmp_path / "run-2")["extends"] == {
        "run": str(tmp_path / "run"),
        "run_id": extended["run_id"],
        "step": 10,
        "start_times": [extended["starts"][0]["time"]],
    }

    another_optimizer = FINGERPRINT | {"optimizer": {}}
    extended_again = train(
        fingerprint=another_optimizer, steps=[40], resume_from_checkpoint=str(tmp_path / "run-2")
    )
    assert extended_again == "run-3 from step 30"
    assert logged_steps(tmp_path / "run-3") == [10, 30, 40]
    assert len(start_times(record_of(tmp_path / "run-3"))) == 3


def test_a_run_that_extends_another_one_and_is_killed_keeps_its_log(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(steps=[10])
    source = str(tmp_path / "run")
    folder = tmp_path / "run-2"

    assert train(crash=True, resume_from_checkpoint=source) == "run-2 from step 10"
    assert train(steps=[20], crash=True, resume_from_checkpoint=source) == "run-2 from step 10"
    assert logged_steps(folder) == [10, 20]
    assert train(steps=[30], crash=True, resume_from_checkpoint=source) == "run-2 from step 20"
    assert logged_steps(folder) == [10, 20, 30]
    assert record_of(folder)["extends"]["step"] == 10

    # torchrun restarts a run with the same command, whatever other runs are unfinished.
    assert train(steps=[40], crash=True, resume_from_checkpoint="never") == "run-3 from step 0"
    assert train(steps=[50], crash=True, resume_from_checkpoint="never") == "run-4 from step 0"
    begin_later(tmp_path / "run-3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(resume_from_checkpoint="never") == "run-3 from step 40"
    assert train(resume_from_checkpoint="never") == "run-4 from step 50"


@pytest.mark.parametrize(
    ("changes", "source", "named"),
    [
        pytest.param({"model": {"width": 5}}, "run", "width 4 there, 5 here", id="other model"),
        pytest.param({"data": "other"}, "run", "differs in data", id="other data"),
        pytest.param({}, ".", "neither a run folder nor a checkpoint", id="no run"),
    ],
)
def test_a_named_checkpoint_that_does_not_fit_is_refused(
    changes: dict[str, Any], source: str, named: str, train, tmp_path: Path
) -> None:
    train(steps=[10])
    source_folder = str(tmp_path / source)

    with pytest.raises(UserError, match=named) as error:
        train(fingerprint=FINGERPRINT | changes, resume_from_checkpoint=source_folder)

    assert source_folder in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run-2").exists()


# --- checkpoints of a run


def test_weights_that_are_not_finite_are_never_saved(
    start, small_model: SmallModel, tmp_path: Path
) -> None:
    with torch.no_grad():
        small_model.model.weight[1, 1] = float("inf")

    message = "weight has values that are not finite, so nothing was saved"
    with pytest.raises(UserError, match=message), start() as run:
        small_model.save(run, 1)

    assert [*(tmp_path / "run").glob("checkpoints/*")] == []
    assert status_of(tmp_path / "run")["state"] == "failed"


def test_the_checkpoint_with_the_lowest_eval_loss_is_kept(
    start, small_model: SmallModel, tmp_path: Path
) -> None:
    eval_losses = {1: 3.0, 2: 1.0, 3: 2.0, 5: 2.5}
    with start() as run:
        for step in range(1, 7):
            run.status.step = step
            if step in eval_losses:
                run.log({"eval/loss": eval_losses[step]})
            small_model.save(run, step)
        finish(run, small_model.model)

    best = 2
    newest = [5, 6]
    assert saved_steps(tmp_path / "run") == [best, *newest]


def test_a_background_save_that_fails_stops_the_run(
    start, small_model: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with start(async_save=True) as run:
        small_model.save(run, 1)
        run.saver.wait()
        assert not run.wants_to_stop()

        monkeypatch.setattr("llmtrain.record.saver.write_tensors", fail_to_write)
        small_model.save(run, 2)
        wait_until(run.wants_to_stop)
        with pytest.raises(UserError, match=r"could not be written \(.*No space left"):
            small_model.save(run, 3)

    assert saved_steps(tmp_path / "run") == [1]


def test_a_save_is_in_the_status_and_twice_its_time_is_kept_free_before_the_deadline(
    start, small_model: SmallModel
) -> None:
    with start() as run:
        run.saver.longest_seconds = 50.0
        small_model.save(run, 1)
        status = status_of(run.folder)
        assert (status["state"], status["step"]) == ("running", 1)

        assert run.deadline.reserved["save"] == 2 * 50.0
        assert not run.wants_to_stop()
        run.deadline.reason = "time is up"
        run.deadline.at = time.monotonic() + 2 * 50.0
        assert run.wants_to_stop()
        finish(run, small_model.model)


def test_the_loss_scale_the_skipped_steps_and_the_choice_to_compile_are_restored(
    start, small_model: SmallModel, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    scaler.scale(torch.ones(1))  # the scale is made on first use
    monkeypatch.setattr(accelerator, "scaler", scaler)
    with contextlib.suppress(CrashError), start() as run:
        run.status.compiled = True
        run.status.skipped = 3
        small_model.save(run, 1)
        raise CrashError

    new_scaler = torch.amp.GradScaler("cpu")
    monkeypatch.setattr(accelerator, "scaler", new_scaler)
    with start() as run:
        small_model.restore(run)
        assert run.status.compiled is True
        assert run.status.skipped == 3
        finish(run, small_model.model)

    assert new_scaler.get_scale() == 1024.0
    assert new_scaler.state_dict()["growth_interval"] == 7


# --- records


def test_the_record_describes_each_start_and_keeps_the_id_of_the_run(train, tmp_path: Path) -> None:
    train(steps=[10], crash=True)
    record = record_of(tmp_path / "run")
    train()

    assert record_of(tmp_path / "run")["run_id"] == record["run_id"]
    assert record["fingerprint"] == FINGERPRINT
    (first_start,) = record["starts"]
    assert first_start["versions"]["torch"] == torch.__version__
    assert first_start["threads"] == torch.get_num_threads()


def test_the_log_and_the_history_of_a_run_have_each_entry(
    start, small_model: SmallModel, tmp_path: Path
) -> None:
    with start() as run:
        assert len(run.history()) == 0

        run.status.step = 1
        run.log({"train/loss": 3.0, "phases": {"forward": [0.25, 0.5]}, "batch": "a-b"})
        run.status.step = 2
        run.log({"train/loss": float("nan")})
        run.log({"eval/loss": 2.5})
        finish(run, small_model.model)

    assert [entry.get("train/loss") for entry in metrics(tmp_path / "run")] == [3.0, None, None]
    history = run.history()
    assert history["step"].tolist() == [1, 2, 2]
    assert history["train/loss"].dropna().tolist() == [3.0]
    assert history.set_index("step")["eval/loss"].dropna().to_dict() == {2: 2.5}
    assert history["phases/forward"][0] == 0.5, "that of the slowest rank"
    assert "batch" not in history, "text cannot be plotted"


def test_a_pickled_run_becomes_a_summary(start, small_model: SmallModel) -> None:
    """Accelerate's notebook_launcher pickles the result of ``main``."""
    with start() as run:
        run.status.step = 3
        run.log({"eval/loss": 2.5})
        finish(run, small_model.model)

    assert repr(run) == f"Run('{run.folder}', finished, step 3, eval loss 2.5000)"
    summary = pickle.loads(pickle.dumps(run))

    assert summary == RunSummary(folder=run.folder, state="finished", step=3, eval_loss=2.5)


# --- trackers


def test_trackers_get_a_description_and_exit_codes(train, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    exit_codes: list[int] = []
    monkeypatch.setattr(MetricsLog, "start", lambda self, names, run: runs.append(run))
    monkeypatch.setattr(
        MetricsLog, "close", lambda self, exit_code, model=None: exit_codes.append(exit_code)
    )

    train(steps=[10, 20], crash=True)
    train(steps=[30])

    parameters = sum(p.numel() for p in nn.Linear(2, 2).parameters())
    config = runs[0].config
    assert config["parameters"] == config["trained_parameters"] == parameters
    assert config["layout"] == {"processes": 1, "accumulation": 2, "micro_batch": 16}
    assert config["seed"] == 3
    assert len(config["data_sha256"]) == 64
    assert exit_codes == [1, 0]


# --- flags


def test_report_to_names_trackers_or_none() -> None:
    assert RunConfig(report_to=["wandb", "tensorboard"]).trackers == ["wandb", "tensorboard"]
    assert RunConfig(report_to=["none"]).trackers == []
    assert RunConfig().trackers == ["auto"]
    with pytest.raises(UserError, match="--report_to"):
        RunConfig(report_to=["none", "wandb"])


@pytest.mark.parametrize("steps", ["5:4", "a:b"])
def test_steps_of_an_xray_that_are_no_range_are_refused(steps: str) -> None:
    with pytest.raises(UserError, match="--xray_steps"):
        LogConfig(xray_steps=steps)


def test_an_order_of_its_own_and_a_sum_after_each_micro_batch_exclude_each_other() -> None:
    with pytest.raises(UserError, match="leave --sync_each_batch out"):
        ParallelConfig(bitwise=True, sync_each_batch=True)
