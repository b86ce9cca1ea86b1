"""A call of the file system that fails once, at any moment, costs one line and nothing else."""

import collections
import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmtrain.files import read_object
from llmtrain.record.checkpoint import checkpoints, find_fault, read_state
from tests.failing_calls import KINDS, failing, logging_calls, needs_failing_calls, preloaded
from tests.launching import ROOT, Ended, bound, long_form, metrics, write_text

FLAGS = shlex.split(
    "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --tokenizer byte --global_batch_size 2 "
    "--per_device_train_batch_size 2 --warmup_steps 1 --max_steps 6 --save_steps 2 "
    "--save_total_limit 2 --logging_steps 1 --eval_steps 6 --report_to none --threads 1"
)
SAVED_STEPS = (2, 4, 6)
FIRST_CALLS = 40  # how many calls of a kind fail, one in each case
ERRORS = {
    "open": ("EIO", "ESTALE", "ENOSPC", "EACCES", "EMFILE"),
    "read": ("EIO", "ESTALE", "ENOSPC", "EACCES", "ETIMEDOUT"),
    "write": ("EIO", "ESTALE", "ENOSPC", "EROFS", "EDQUOT"),
    "fsync": ("EIO", "ESTALE", "ENOSPC", "EROFS", "EDQUOT"),
    "rename": ("EIO", "ESTALE", "ENOSPC", "EROFS", "EACCES"),
    "mkdir": ("EIO", "ESTALE", "ENOSPC", "EROFS", "EDQUOT"),
    "unlink": ("EIO", "ESTALE", "ENOSPC", "EACCES", "EROFS"),
    "flock": ("EIO", "ESTALE", "ENOSPC", "EACCES", "ENOLCK"),
}
# make torture tries each error of each call.
ALL_ERRORS = bool(os.environ.get("LLMTRAIN_ALL_ERRORS"))


class Case(NamedTuple):
    """The call that fails: the n-th one of a kind, in the run folder or in the cache."""

    start: str  # "new", or "resumed" from step 4
    place: str
    kind: str
    number: int
    error: str


class Runs:
    """Makes runs with failing calls.

    Attributes:
        model: the weights that an undisturbed run ends with.
        calls: how many calls of a kind there are, by start, place and kind.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.text = str(write_text(base / "text.txt", sentences=60))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.system.warm_gpt", *FLAGS, "--dataset", self.text],
            cwd=ROOT,
            env={**os.environ, **preloaded(), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

        stop = failing("rename", "EIO", "checkpoints/step-00000006")
        assert self.run(self.folder_of("new", "stopped"), stop).status == 2
        self.calls = {start: self._count_calls(start) for start in ("new", "resumed")}
        self.model = _model_of(self.base / "calls-new")

    def close(self) -> None:
        self._server.communicate()

    def run(self, folder: Path, variables: dict[str, str]) -> Ended:
        """Make a run whose run folder and cache are in a folder."""
        number = len([*self.base.glob(f"{folder.name}.err*")])  # all are kept, for a look
        outputs = [self.base / f"{folder.name}.{name}{number}" for name in ("out", "err")]
        flags = [*FLAGS, "--dataset", self.text, "--output_dir", str(folder / "run")]
        variables = {"LLMTRAIN_CACHE": str(folder / "cache"), **variables}
        request = json.dumps([flags, variables, [*map(str, outputs)]])
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(request + "\n")
        status = int(self._server.stdout.readline())
        return Ended(status, *[path.read_text(errors="replace") for path in outputs])

    def folder_of(self, start: str, name: str) -> Path:
        """Return a new folder as a start finds it: empty, or with a run that ended after step 4."""
        folder = self.base / name
        shutil.rmtree(folder, ignore_errors=True)
        if start == "new":
            folder.mkdir()
        else:
            shutil.copytree(self.base / "stopped", folder)
        return folder

    def _count_calls(self, start: str) -> dict[tuple[str, str], int]:
        """Return how many calls of each kind an undisturbed run makes, by place and kind."""
        folder = self.folder_of(start, f"calls-{start}")
        log = self.base / f"calls-{start}.txt"
        self.run(folder, logging_calls(str(folder), log)).assert_ok()
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in log.read_text().splitlines():
            kind, path = line.split(" ", 1)
            place = path[len(str(folder)) + 1 :].partition("/")[0]
            counts[place, kind] += 1
        return counts

    def cases(self) -> list[Case]:
        """Return a case for each call and error."""
        cases = []
        for start, place, kind in itertools.product(("new", "resumed"), ("run", "cache"), KINDS):
            for number in range(min(FIRST_CALLS, self.calls[start][place, kind])):
                cases += [Case(start, place, kind, number, error) for error in ERRORS[kind]]
        return cases

    def faults(self, case: Case) -> list[str]:
        """Make a run with a failing call and, if it has failed, another one without."""
        folder = self.folder_of(case.start, "-".join(map(str, case)).replace("/", "-"))
        place = str(folder / case.place)
        ended = self.run(folder, failing(case.kind, case.error, place, after=case.number))
        faults = [*self._faults_of_end(case, folder, ended), *_faults_of_checkpoints(folder)]
        if ended.status == 0 and case.kind == "fsync":
            faults.append("nobody heard of it")
        # Nothing is left to do if only the last sync has failed, of the folder with status.json.
        if read_object(folder / "run/status.json").get("state") != "finished":
            intact_steps = [
                read_state(path)["step"] for path in checkpoints(folder / "run/checkpoints")
            ]
            ended = self.run(folder, {})
            if ended.status != 0:
                faults.append(f"next start: {ended.err}")
            if intact_steps and f"resumes from step {max(intact_steps)}" not in ended.out:
                faults.append("the next start does not resume")
            faults += _faults_of_checkpoints(folder)
            leftovers = sorted(path.name for path in folder.rglob(".tmp-*"))
            if leftovers:
                faults.append(f"left: {leftovers}")

        names = sorted(path.name for path in folder.iterdir())
        if names != ["cache", "run"]:
            faults.append(f"folders: {names}")
        if _model_of(folder) != self.model:
            faults.append("the model differs")
        if not faults:
            shutil.rmtree(folder)
        return faults

    def _faults_of_end(self, case: Case, folder: Path, ended: Ended) -> list[str]:
        """Return what is wrong with the exit status and the error of a run with a failing call."""
        if "Traceback" in ended.err or "Exception" in ended.err or ended.status not in (0, 2):
            return [f"status {ended.status}: {ended.err[-400:]}"]
        errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        if len(errors) != (ended.status != 0) or not all(str(folder) in line for line in errors):
            return [f"status {ended.status}: {errors}"]
        return []


def _faults_of_checkpoints(folder: Path) -> list[str]:
    """Return which checkpoints are damaged, renamed or lost, and whether one was set aside."""
    paths = checkpoints(folder / "run/checkpoints")
    faults = [f"{path.name}: {fault}" for path in paths if (fault := find_fault(path))]
    faults += [f"set aside: {path.name}" for path in folder.glob("run/checkpoints/damaged-*")]

    steps = [int(path.name.removeprefix("step-")) for path in paths]
    entries = metrics(folder / "run") if (folder / "run/metrics.jsonl").exists() else []
    logged_step = max((entry["step"] for entry in entries), default=0)
    for step in SAVED_STEPS:
        # The newest two stay. The log goes on after a save has succeeded.
        newer_steps = [other for other in steps if other > step]
        if step < logged_step and step not in steps and len(newer_steps) < 2:
            faults.append(f"step {step} is lost; there are {steps}")
    return faults


def _model_of(folder: Path) -> bytes:
    path = folder / "run/model/model.safetensors"
    return path.read_bytes() if path.is_file() else b""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("disk"))
    yield runs
    runs.close()


# The calls of the end of a run are not among the first ones.
LAST_STATUS = Case("new", "run/status.json", "rename", number=4, error="EIO")


@needs_failing_calls
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [8, pytest.param(40, marks=long_form)])
def test_a_call_that_fails_once_costs_one_line(
    count: int, runs: Runs, score: Callable[[str], None]
) -> None:
    cases = runs.cases()
    if not ALL_ERRORS or count == 8:
        cases = [LAST_STATUS, *random.Random(count).sample(cases, count)]
    faulty = {case: faults for case in cases if (faults := runs.faults(case))}
    score(f"disk: failing calls with another end than promised: {bound(len(faulty), len(cases))}")
    assert not faulty
