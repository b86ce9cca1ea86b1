"""Let tests run offline, and write nothing outside temporary folders."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from accelerate import Accelerator

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", NETRC=os.devnull)
# Two tests on two cores must not fight for threads, nor must threads that wait keep others from a core.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
for name in [*os.environ]:
    if name.startswith(("WANDB_", "ACCELERATE_")):
        del os.environ[name]

# Under nohup, runs that the tests start would ignore it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example may take long on a busy machine.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# If an assertion in a module that tests share fails, pytest shows its values as in a file of tests.
pytest.register_assert_rewrite("tests.data")

# After the environment is set, since Hugging Face's libraries read it when they are imported.
from tests.launching import LONG, WARNING_FILTERS, write_text  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread_for_runs_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep hundreds of runs from leaving a pool of threads each; others pass --threads 1."""
    accelerator = sys.modules.get("llmtrain.launching.accelerator")
    if accelerator is not None:
        monkeypatch.setattr(accelerator, "cpu_cores", lambda: 1)


@pytest.fixture(scope="session", autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("private")
    os.environ["LLMTRAIN_CACHE"] = str(base / "cache")
    os.environ["HF_HOME"] = str(base / "hf")  # has no accelerate config of the user


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 30 kB that a model can learn."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all workers of pytest. To make something in it, take a lock."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    folder = base / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """Fail if the tests of a file leave a process group. The next file would be part of it."""
    yield

    dist = sys.modules.get("torch.distributed")
    assert dist is None or not dist.is_initialized()


@pytest.fixture
def score(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Report a count or a difference. All of them are printed together, after the tests."""
    return lambda line: record_property("score", line)


def pytest_configure(config: pytest.Config) -> None:
    for line in WARNING_FILTERS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="a long form: make test-all runs it"))

    # Files whose tests start processes take longest. They come first, so that no worker waits at
    # the end. The order within a file stays the same, and so do the fixtures that its tests share.
    items.sort(key=lambda item: "/tests/system/" not in str(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            lines += [line for name, line in report.user_properties if name == "score"]

    if lines:
        terminalreporter.section("scoreboard")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture
def accelerator() -> "Iterator[Accelerator]":
    """An Accelerator of one process on the CPU, with the settings of a run."""
    from llmtrain.launching.accelerator import forget_accelerator, start_accelerator

    forget_accelerator()
    yield start_accelerator()

    forget_accelerator()
