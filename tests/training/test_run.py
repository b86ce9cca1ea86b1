import contextlib
import json
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import torch
from accelerate import Accelerator

from llmtrain.cli import main
from llmtrain.data.config import DataConfig
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.record import resume, saver
from llmtrain.record.history import History
from llmtrain.record.stopping import Deadline
from llmtrain.record.trackers import weights_and_biases
from llmtrain.record.tracking import Metrics
from llmtrain.training import opening
from llmtrain.training.opening import open_run
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run import RunSummary
from llmtrain.training.run_state import restore, save
from llmtrain.training.settings import LogConfig, OptimConfig, RunConfig, Settings
from tests.engines import engine_of, finish
from tests.launching import read_json
from tests.record.test_checkpoint import Files
from tests.wandb_file import read_history

FINGERPRINT = {"model": {"width": 4}, "data": "abc", "seed": 0, "optimizer": {"learning_rate": 0.1}}


class CrashError(Exception):
    """Stands for a crash."""


@pytest.fixture(scope="module")
def rows() -> Tokenized:
    return tokenize(
        DataConfig(tokenizer="byte"),
        8,
        records=lambda: iter(["a text", "another text", "and more of it"]),
    )


@pytest.fixture
def opened(
    accelerator: Accelerator, tmp_path: Path, rows: Tokenized, monkeypatch: pytest.MonkeyPatch
):
    """Open a run in ``tmp_path/run`` of an fingerprint that the test chooses."""

    def go(
        fingerprint: dict = FINGERPRINT,
        check_files: Callable[[], None] = lambda: None,
        **flags: object,
    ):
        monkeypatch.setattr(opening, "run_fingerprint", lambda *_: fingerprint)
        told = {"output_dir": str(tmp_path / "run"), "report_to": ["none"], **flags}
        settings = Settings(data=DataConfig(), optim=OptimConfig(seed=3), run=RunConfig(**told))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        bundle = ModelBundle(model, Files(), check_files=check_files)
        return open_run(accelerator, settings, rows, bundle, optimizer)

    return go


@pytest.fixture
def begin(accelerator: Accelerator, opened):
    """Open a run, save at ``steps``, and end as the test chooses."""

    def go(
        fingerprint: dict = FINGERPRINT,
        steps: tuple[int, ...] = (),
        crash: bool = False,
        **flags: Any,
    ):
        model = torch.nn.Linear(3, 2)
        optimizer = make_optimizer(accelerator, model, OptimConfig())
        model, optimizer = accelerator.prepare(model, optimizer)
        engine = engine_of(accelerator, model)
        try:
            with opened(fingerprint, **flags) as run:
                started = run.step
                for step in steps:
                    run.status.step, run.status.tokens = step, step * 100
                    run.log({"train/loss": 1.0})
                    save(run, engine, OptimizerState(model, optimizer.optimizer))
                if crash:
                    raise CrashError("out of luck")
                finish(run, model)
        except CrashError:
            pass
        return run.folder.name, started

    return go


def test_the_same_command_again_takes_the_next_free_name(begin) -> None:
    assert [begin()[0] for _ in range(3)] == ["run", "run-2", "run-3"]


def test_an_unfinished_run_goes_on_from_its_newest_checkpoint(begin, tmp_path: Path) -> None:
    assert begin(steps=(10, 20), crash=True) == ("run", 0)
    assert read_json(tmp_path / "run/status.json")["state"] == "failed"
    assert read_json(tmp_path / "run/status.json")["reason"] == "out of luck"
    (tmp_path / "run/metrics.jsonl").open("a").write(
        '{"step": 25, "train/loss": 9}\n{"step": 26, "tr'
    )
    assert begin(steps=(30,)) == ("run", 20)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [10, 20, 30]
    record = read_json(tmp_path / "run/run.json")
    assert [start["step"] for start in record["starts"]] == [0, 20]
    assert read_json(tmp_path / "run/status.json")["state"] == "finished"
    assert begin() == ("run-2", 0)


def test_a_second_interrupted_run_is_found_behind_a_finished_one(begin) -> None:
    begin()
    assert begin(steps=(5,), crash=True) == ("run-2", 0)
    assert begin() == ("run-2", 5)


def test_a_run_with_no_checkpoint_yet_starts_again_in_its_place(begin) -> None:
    begin(crash=True)
    assert begin() == ("run", 0)


def test_only_a_resume_after_a_failure_checks_the_files_of_the_base(begin, tmp_path: Path) -> None:
    checks: list[str] = []
    begin(steps=(10,), crash=True, check_files=lambda: checks.append("new"))
    begin(steps=(20,), crash=True, check_files=lambda: checks.append("failed"))
    status = tmp_path / "run/status.json"
    status.write_text(json.dumps({**read_json(status), "state": "running"}))
    begin(steps=(30,), crash=True, check_files=lambda: checks.append("killed"))
    status.write_text(json.dumps({**read_json(status), "state": "preempted"}))
    begin(check_files=lambda: checks.append("preempted"))
    assert checks == ["failed", "killed"]


@pytest.mark.parametrize("key", ["model", "data", "seed", "optimizer"])
def test_a_run_of_another_identity_is_left_alone(begin, key: str) -> None:
    begin(steps=(10,), crash=True)
    assert begin({**FINGERPRINT, key: "other"}) == ("run-2", 0)


def test_never_begins_anew(begin) -> None:
    begin(steps=(10,), crash=True)
    assert begin(resume_from_checkpoint="never") == ("run-2", 0)


def test_a_run_that_another_process_holds_is_left_alone(
    begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(resume, "_WAIT_SECONDS", 0.1)
    begin(steps=(10,), crash=True)
    with filelock.FileLock(tmp_path / "run/.lock"):
        assert begin() == ("run-2", 0)
    assert (
        "is in use; waiting up to 0.1 s for that run to end before using another folder"
        in capsys.readouterr().out
    )


def test_a_run_whose_last_process_is_just_ending_is_waited_for(begin, tmp_path: Path) -> None:
    """A launcher that is killed leaves workers that save; whoever starts again at once means that run."""
    begin(steps=(10,), crash=True)
    held = filelock.FileLock(tmp_path / "run/.lock", thread_local=False)
    held.acquire()
    threading.Timer(0.5, held.release).start()
    assert begin() == ("run", 10)


def test_a_run_without_a_status_that_can_be_read_goes_on(begin, tmp_path: Path) -> None:
    begin(steps=(10,), crash=True)
    (tmp_path / "run/status.json").write_text("{")
    assert begin(steps=(20,), crash=True) == ("run", 10)
    (tmp_path / "run/status.json").unlink()
    assert begin() == ("run", 20)


def test_a_run_begun_from_a_named_checkpoint_goes_on_when_it_is_started_again(
    begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(steps=(10,))
    named = {"resume_from_checkpoint": str(tmp_path / "run")}
    assert begin(steps=(20,), crash=True, **named) == ("run-2", 10)
    assert begin(steps=(30,), crash=True, **named) == ("run-2", 20)
    assert begin(steps=(40,), crash=True, resume_from_checkpoint="never") == ("run-3", 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begin(resume_from_checkpoint="never") == ("run-2", 30)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder nobody can write")
def test_a_folder_that_cannot_be_made_is_one_line_with_a_remedy(begin) -> None:
    with pytest.raises(
        UserError, match=r"^--output_dir /proc/x .*; name a folder in which you may"
    ):
        begin(output_dir="/proc/x")


def damage_all(folder: Path) -> None:
    for path in folder.glob("checkpoints/step-*/model/model.safetensors"):
        path.write_bytes(b"")


def test_a_restarted_run_without_an_intact_checkpoint_starts_again_once(
    begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    begin(steps=(10, 20), crash=True)
    damage_all(folder)
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact"):
        begin()  # a person reads this

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert begin(crash=True) == ("run", 0)
    assert begin(steps=(10,), crash=True) == ("run", 0)  # nothing new is lost
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    assert begin(steps=(20,), crash=True) == ("run", 10)

    aside = ["damaged-step-00000020", "damaged-step-00000010"]
    assert all((folder / "checkpoints" / name).is_dir() for name in aside)
    starts = read_json(folder / "run.json")["starts"]
    assert [start["lost_checkpoints"] for start in starts] == [[], aside, [], []]
    capsys.readouterr()
    for arguments in ([str(tmp_path)], ["check", str(folder)]):
        with contextlib.suppress(SystemExit):
            main(["runs", *arguments])
        assert "steps 1 to 20 were lost" in capsys.readouterr().out

    damage_all(folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint in .* is intact"):
            begin()
    assert (folder / "checkpoints" / "damaged-step-00000020-2").is_dir()


@pytest.fixture
def start_at_once(opened, monkeypatch: pytest.MonkeyPatch):
    """Start a run in several processes, none of which goes on before all have chosen a folder."""

    def go(count: int, **flags: str) -> list[str]:
        context = multiprocessing.get_context("fork")
        have_chosen, outcomes = context.Barrier(count), context.SimpleQueue()
        deadline_of = Deadline.of

        def wait_for_the_others(*arguments: object) -> Deadline:
            have_chosen.wait(60)
            return deadline_of(*arguments)

        def start() -> None:
            try:
                with opened(**flags) as run:
                    outcomes.put(f"{run.folder.name} from step {run.step}")
                    have_chosen.wait(60)  # hold the folder until all have said theirs
            except BaseException as error:
                outcomes.put(repr(error))
                have_chosen.abort()

        monkeypatch.setattr(Deadline, "of", wait_for_the_others)
        children = [context.Process(target=start) for _ in range(count)]
        for child in children:
            child.start()
        names = sorted(outcomes.get() for _ in children)
        for child in children:
            child.join()
        return names

    return go


def test_starts_at_the_same_moment_take_folders_of_their_own(start_at_once, tmp_path: Path) -> None:
    assert start_at_once(3) == ["run from step 0", "run-2 from step 0", "run-3 from step 0"]
    assert not (tmp_path / "run-4").exists()


def test_of_two_starts_at_the_same_moment_one_goes_on_with_an_unfinished_run(
    begin, start_at_once, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "_WAIT_SECONDS", 0.1)
    begin(steps=(10,), crash=True)
    assert start_at_once(2) == ["run from step 10", "run-2 from step 0"]


def test_a_name_that_another_start_has_just_taken_is_left_to_it(
    begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if the file system kept no locks."""
    is_free = resume.is_free

    def lose_the_race(folder: Path) -> bool:
        was_free = is_free(folder)
        (tmp_path / "run").mkdir(exist_ok=True)
        return was_free

    monkeypatch.setattr(resume, "is_free", lose_the_race)
    assert begin() == ("run-2", 0)


def test_files_that_are_not_a_run_are_left_alone(begin, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("mine")
    assert begin()[0] == "run-2"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_named_checkpoint_is_gone_on_from_in_a_new_folder(begin, tmp_path: Path) -> None:
    numbered = {
        **FINGERPRINT,
        "model": {"id2label": {0: "no", 1: "yes"}},
    }  # a file's keys are words
    begin(numbered, steps=(10, 20))
    assert begin(numbered, resume_from_checkpoint=str(tmp_path / "run")) == ("run-2", 20)
    named = str(tmp_path / "run/checkpoints/step-00000010")
    assert begin(numbered, resume_from_checkpoint=named) == ("run-3", 10)


def logged_steps(folder: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_an_extended_run_keeps_the_log_until_its_checkpoint(begin, tmp_path: Path) -> None:
    begin(steps=(10, 20))
    (tmp_path / "run/samples.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    named = str(tmp_path / "run/checkpoints/step-00000010")
    assert begin(steps=(30,), resume_from_checkpoint=named) == ("run-2", 10)
    assert logged_steps(tmp_path / "run-2") == [10, 30]
    assert (tmp_path / "run-2/samples.jsonl").read_text() == '{"step": 10}\n'
    assert logged_steps(tmp_path / "run") == [10, 20], "the extended run is left as it is"

    first = read_json(tmp_path / "run/run.json")
    extends = read_json(tmp_path / "run-2/run.json")["extends"]
    assert extends == {
        "run": str(tmp_path / "run"),
        "run_id": first["run_id"],
        "step": 10,
        "start_times": [first["starts"][0]["time"]],
    }
    assert first["extends"] is None


def test_a_run_that_is_extended_twice_keeps_everything(begin, tmp_path: Path) -> None:
    begin(steps=(10,))
    assert begin(steps=(20,), resume_from_checkpoint=str(tmp_path / "run")) == ("run-2", 10)
    assert begin(steps=(30,), resume_from_checkpoint=str(tmp_path / "run-2")) == ("run-3", 20)
    assert logged_steps(tmp_path / "run-3") == [10, 20, 30]

    history = History.of_run(tmp_path / "run-3")
    assert history.extends["run"] == str(tmp_path / "run-2")
    assert len(history.all_start_times()) == 3
    hours = history.training_hours()
    assert None not in hours
    assert hours == sorted(hours)


def test_an_extended_run_that_is_killed_goes_on_with_the_log_that_it_had(
    begin, tmp_path: Path
) -> None:
    begin(steps=(10,))
    named = {"resume_from_checkpoint": str(tmp_path / "run")}
    assert begin(crash=True, **named) == ("run-2", 10)
    assert begin(steps=(20,), crash=True, **named) == ("run-2", 10)
    assert logged_steps(tmp_path / "run-2") == [10, 20]
    assert begin(steps=(30,), **named) == ("run-2", 20)
    assert logged_steps(tmp_path / "run-2") == [10, 20, 30]
    assert read_json(tmp_path / "run-2/run.json")["extends"]["step"] == 10


def test_the_hours_of_the_run_that_is_extended_count(tmp_path: Path) -> None:
    entries = [{"step": step, "time": 1e9 + seconds} for step, seconds in ((1, 60), (2, 9060))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in entries))
    record = {
        "format_version": 1,
        "extends": {"start_times": ["2001-09-09T01:46:40+0000"]},
        "starts": [{"time": "2001-09-09T04:16:40+0000"}],
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert History.of_run(tmp_path).training_hours() == pytest.approx([1 / 60, 2 / 60])


def test_tensorboard_is_sent_the_log_of_the_run_that_is_extended(begin, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    begin(steps=(10,))
    named = {"resume_from_checkpoint": str(tmp_path / "run"), "report_to": ["tensorboard"]}
    assert begin(steps=(20,), crash=True, **named)[0] == "run-2"
    assert begin(steps=(30,), **named) == ("run-2", 20)
    reader = EventAccumulator(str(tmp_path / "run-2" / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [10, 20, 30]


def test_a_named_checkpoint_of_another_run_is_refused_with_both_values(
    begin, tmp_path: Path
) -> None:
    begin(steps=(10,))
    with pytest.raises(UserError, match=r"a different model: width 4 there, 5 here") as error:
        begin({**FINGERPRINT, "model": {"width": 5}}, resume_from_checkpoint=str(tmp_path / "run"))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(
        "; resume with the same model, or leave out --resume_from_checkpoint to start a new run."
    )
    with pytest.raises(
        UserError, match=r"different data: .*; resume with the same data, or start a"
    ) as error:
        begin({**FINGERPRINT, "data": "other"}, resume_from_checkpoint=str(tmp_path / "run"))
    assert f"--model_name_or_path {tmp_path / 'run'}." in str(error.value)
    assert (
        begin({**FINGERPRINT, "optimizer": {}}, resume_from_checkpoint=str(tmp_path / "run"))[1]
        == 10
    )
    with pytest.raises(UserError, match="neither a run folder nor a checkpoint"):
        begin(resume_from_checkpoint=str(tmp_path))


def test_the_record_says_what_ran_and_keeps_its_name(begin, tmp_path: Path) -> None:
    begin(steps=(10,), crash=True)
    first = read_json(tmp_path / "run/run.json")
    begin()
    second = read_json(tmp_path / "run/run.json")
    assert first["run_id"] == second["run_id"]
    assert first["format_version"] == 1
    assert first["fingerprint"] == FINGERPRINT
    start = first["starts"][0]
    assert start["processes"] == 1
    assert start["versions"]["torch"] == torch.__version__
    assert start["threads"] == torch.get_num_threads()


def test_a_tracker_that_fails_does_not_stop_the_run(
    opened,
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    with opened(report_to=["tensorboard"]) as run:
        monkeypatch.setattr(accelerator.trackers[0], "log", lambda *_, **__: 1 / 0)
        for step in (1, 2, 3):
            run.status.step = step
            run.log({"train/loss": 1.0})
        finish(run, torch.nn.Linear(2, 2))
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert capsys.readouterr().err.count("tracking stopped: division by zero") == 1


def test_tensorboard_holds_what_the_file_holds(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with opened(report_to=["tensorboard"]) as run:
        for step in (1, 2):
            run.status.step = step
            run.log({"train/loss": step / 4})
        finish(run, torch.nn.Linear(2, 2))
    (events,) = [
        path.parent for path in run.folder.rglob("events.*") if path.parent.name == "tensorboard"
    ]
    reader = EventAccumulator(str(events))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == [
        (1, 0.25),
        (2, 0.5),
    ]


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        (["weights"], "is not known: use aim, clearml, comet_ml, .*, wandb, all or none"),
        (["swanlab"], "its package is not installed; install it with pip install swanlab"),
        (["aim"], "install it with pip install 'aim<4'"),
        (["none", "wandb"], "contradict"),
    ],
)
def test_trackers_that_cannot_be_are_one_line(trackers: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RunConfig(report_to=trackers)


def test_all_trackers_are_those_that_are_installed() -> None:
    assert RunConfig(report_to=["all"]).trackers == ["tensorboard", "wandb"]
    assert RunConfig(report_to=["wandb", "all"]).trackers == ["wandb", "tensorboard"]
    assert RunConfig(report_to=["none"]).trackers == []


@pytest.mark.parametrize("steps", ["4", "0:3", "5:4", "a:b", "1:2:3", "-1:2", ""])
def test_updates_to_record_are_two_numbers(steps: str) -> None:
    with pytest.raises(UserError, match="write two numbers such as 6:8, counted from 1"):
        LogConfig(xray_steps=steps)


def test_weights_that_are_not_finite_are_never_saved(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    with torch.no_grad():
        model.weight[1, 1] = float("inf")
    with (
        pytest.raises(
            UserError, match="weight has values that are not finite, so nothing was saved"
        ),
        opened() as run,
    ):
        save(run, engine, OptimizerState(model, optimizer.optimizer))
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert read_json(tmp_path / "run/status.json")["state"] == "failed"


def test_a_number_that_json_has_no_word_for_is_null(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    with opened() as run:
        run.log({"train/loss": float("nan"), "train/grad_norm": 1.0})
        finish(run, torch.nn.Linear(2, 2))
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["train/loss"] is None


def test_where_wandb_does_not_answer_the_run_is_logged_offline(
    opened,
    accelerator: Accelerator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(weights_and_biases, "_INIT_SECONDS", 2)
    with opened(report_to=["wandb"]) as run:
        run.status.step = 1
        run.log({"train/loss": 0.5})
        finish(run, torch.nn.Linear(2, 2))
    said = capsys.readouterr()
    assert "W&B does not answer" in said.err
    assert "offline; to upload it later: wandb login && wandb sync" in said.out
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert [line["train/loss"] for line in read_history(file)] == [0.5]


def test_a_run_whose_folder_was_taken_over_saves_nothing_more(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    """As where a file system does not keep locks between machines."""
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    with opened() as run:
        run.status.step = 1
        save(run, engine, OptimizerState(model, optimizer.optimizer))
        status = read_json(tmp_path / "run/status.json")
        (tmp_path / "run/status.json").write_text(json.dumps({**status, "start_id": "another"}))
        run.status.step = 2
        with pytest.raises(
            UserError, match="another run has taken over this folder, so no checkpoint was saved"
        ):
            save(run, engine, OptimizerState(model, optimizer.optimizer))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    assert read_json(tmp_path / "run/status.json")["start_id"] == "another", (
        "it is the other's to write"
    )


def test_the_best_checkpoint_stays_beside_the_newest(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    with opened() as run:
        for step, loss in enumerate([3.0, 1.0, 2.0, None, 2.5, None], start=1):
            run.status.step = step
            if loss is not None:
                run.log({"eval/loss": loss})
            save(run, engine, OptimizerState(model, optimizer.optimizer))
        finish(run, model)
    assert sorted(int(path.name[5:]) for path in (tmp_path / "run/checkpoints").iterdir()) == [
        2,
        5,
        6,
    ]


def test_a_save_in_the_background_that_fails_stops_the_run(
    opened, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    with opened(async_save=True) as run:
        run.status.step = 1
        save(run, engine, OptimizerState(model, optimizer.optimizer))
        run.saver.wait()
        assert not run.wants_to_stop()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saver, "write_tensors", full)
        run.status.step = 2
        save(run, engine, OptimizerState(model, optimizer.optimizer))
        while not run.wants_to_stop():
            pass
        with pytest.raises(UserError, match=r"could not be written \(.*No space left"):
            save(run, engine, OptimizerState(model, optimizer.optimizer))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]


def test_what_was_skipped_and_whether_blocks_are_compiled_is_gone_on_with(
    opened, accelerator: Accelerator, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    with contextlib.suppress(CrashError), opened() as run:
        run.status.compiled, run.status.skipped = True, 3
        run.status.step, run.status.tokens = 1, 10
        save(run, engine, OptimizerState(model, optimizer.optimizer))
        raise CrashError
    with opened() as run:
        assert run.status.compiled is None
        restore(run, engine, OptimizerState(model, optimizer.optimizer))
        assert (run.status.compiled, run.status.skipped) == (True, 3)
        finish(run, model)


def test_the_loss_scale_of_fp16_is_gone_on_with(
    opened, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    engine = engine_of(accelerator, model)
    optimizer = accelerator.prepare(make_optimizer(accelerator, model, OptimConfig()))
    monkeypatch.setattr(
        accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    )
    with contextlib.suppress(CrashError), opened() as run:
        accelerator.scaler.scale(torch.ones(1))  # it is made on first use
        run.status.step, run.status.tokens = 1, 10
        save(run, engine, OptimizerState(model, optimizer.optimizer))
        raise CrashError
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu"))
    with opened() as run:
        restore(run, engine, OptimizerState(model, optimizer.optimizer))
        assert accelerator.scaler.get_scale() == 1024.0
        assert accelerator.scaler.state_dict()["growth_interval"] == 7
        finish(run, model)


def test_a_run_is_shown_in_one_line(opened, accelerator: Accelerator, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with opened() as run:
        assert repr(run) == f"Run('{folder}', running, step 0)"
        run.status.step = 3
        run.log({"eval/loss": 2.5})
        finish(run, model)
    assert repr(run) == f"Run('{folder}', finished, step 3, eval loss 2.5000)"

    with contextlib.suppress(CrashError), opened() as run:
        raise CrashError
    assert repr(run) == f"Run('{tmp_path / 'run-2'}', failed, step 0)"


def test_a_run_reaches_another_process_as_a_summary(opened, accelerator: Accelerator) -> None:
    """As accelerate's notebook_launcher sends the result of ``main``."""
    with opened() as run:
        run.status.step = 3
        run.log({"eval/loss": 2.5})
        finish(run, accelerator.prepare(torch.nn.Linear(3, 2)))
    summary = pickle.loads(pickle.dumps(run))
    assert summary == RunSummary(folder=run.folder, state="finished", step=3, eval_loss=2.5)


def test_the_history_of_a_run_has_a_row_for_each_log_entry(opened, accelerator) -> None:
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with opened() as run:
        assert len(run.history()) == 0
        run.status.step = 1
        run.log({"train/loss": 3.0, "phases": {"forward": [0.25, 0.5]}, "batch": "a-b"})
        run.status.step = 2
        run.log({"train/loss": float("nan")})
        run.log({"eval/loss": 2.5})
        finish(run, model)

    history = run.history()
    assert history["step"].tolist() == [1, 2, 2]
    assert history["train/loss"].dropna().tolist() == [3.0]
    assert history.set_index("step")["eval/loss"].dropna().to_dict() == {2: 2.5}
    assert history["phases/forward"][0] == 0.5  # the slowest rank
    assert "batch" not in history, "a text, which cannot be plotted"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a run tells its trackers: at each start, of checkpoints, and at its end."""
    told = SimpleNamespace(starts=[], checkpoints=[], exit_codes=[])
    monkeypatch.setattr(Metrics, "start", lambda self, names, run: told.starts.append(run))
    monkeypatch.setattr(
        Metrics, "send_checkpoint", lambda self, path: told.checkpoints.append(path.name)
    )
    monkeypatch.setattr(
        Metrics, "close", lambda self, exit_code, model=None: told.exit_codes.append(exit_code)
    )
    return told


def test_trackers_are_told_the_size_the_layout_and_the_origin_of_a_run(begin, told) -> None:
    begin(steps=(10,))
    (run,) = told.starts
    assert run.config["parameters"] == run.config["trained_parameters"] == 6
    assert run.config["layout"] == {"processes": 1, "accumulation": 2, "micro_batch": 16}
    assert run.config["seed"] == 3
    assert run.config["versions"]["torch"] == torch.__version__
    assert len(run.config["data_sha256"]) == 64
    assert len(run.start_times) == 1


def test_trackers_get_checkpoints_and_how_a_run_has_ended(begin, told) -> None:
    begin(steps=(10, 20), crash=True)
    begin(steps=(30,))
    assert told.checkpoints == ["step-00000010", "step-00000020", "step-00000030"]
    assert told.exit_codes == [1, 0]


def test_the_end_says_that_the_initial_weights_were_better_and_are_not_kept(
    opened, tmp_path: Path
) -> None:
    with opened() as run:
        run.patience.keeps_best = True
        run.patience.record(0, {"eval/loss": 1.5})
        run.status.step = 1
        run.patience.record(1, {"eval/loss": 2.5})
        finish(run, torch.nn.Linear(2, 2))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [(event["kind"], event["text"]) for event in events] == [
        (
            "worse",
            "training has not improved eval/loss: it was 1.5 before the first step and 2.5 at best, "
            "after step 1, whose weights are kept; the initial ones are not",
        )
    ]
