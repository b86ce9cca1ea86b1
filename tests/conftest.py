"""Everything offline, nothing written outside temporary folders, no process left behind."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", NETRC=os.devnull)
os.environ["OMP_NUM_THREADS"] = "1"  # two runs on two cores must not fight for threads
for name in [name for name in os.environ if name.startswith(("WANDB_", "ACCELERATE_"))]:
    del os.environ[name]

from tests.launching import LONG, WARNING_FILTERS, write_text  # noqa: E402 - the environment must be set before Hugging Face is imported


@pytest.fixture(scope="session", autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("private")
    os.environ["LLMTRAIN_CACHE"] = str(base / "cache")
    os.environ["HF_HOME"] = str(
        base / "hf"
    )  # no accelerate config of the person who runs the tests


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 30 kB of text with some structure to learn."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all of pytest's workers; who makes something in it takes a lock."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """Fail if the tests of a file leave a process group, which the next file would belong to."""
    yield
    dist = sys.modules.get("torch.distributed")
    assert dist is None or not dist.is_initialized()


@pytest.fixture
def score(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say what a campaign counted; the lines stand together at the end of the tests."""
    return lambda line: record_property("score", line)


def pytest_configure(config: pytest.Config) -> None:
    for line in WARNING_FILTERS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="a long form: make test-all runs it"))

    # Files whose tests start processes take longest. Begun first, they leave no worker waiting at the
    # end. The order within a file stays, and with it the fixtures that its tests share.
    items.sort(key=lambda item: "/tests/system/" not in str(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
    ]
    lines = [line for report in reports for name, line in report.user_properties if name == "score"]
    if lines:
        terminalreporter.section("scoreboard")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture
def accelerator():
    """A fresh one-process Accelerator on the CPU, with the settings of a run."""
    from accelerate.state import AcceleratorState, GradientState

    from llmtrain.launching.accelerator import start_accelerator

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    reset()
    yield start_accelerator()
    reset()
