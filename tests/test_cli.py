import subprocess
import sys

import pytest

from llmtrain import __version__
from llmtrain.cli import COMMANDS, main


def ended(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(argv))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_comes_without_torch_or_transformers(argv: list[str]) -> None:
    code = (
        "import sys\nfrom llmtrain.cli import main\n"
        f"try: main({argv})\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'datasets', 'numpy', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: llmtrain" in done.stdout


def test_help_names_every_command_and_its_defaults(capsys: pytest.CaptureFixture) -> None:
    status, out, _ = ended(capsys, "--help")
    assert status == 0
    assert all(name in out for name in COMMANDS)
    _, out, _ = ended(capsys, "generate", "--help")
    assert "--max_new_tokens N" in out
    assert "(200)" in out


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert ended(capsys, "--version") == (0, f"llmtrain {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["generate"], "RUN_OR_MODEL"),
        (["generate", "no/such/folder"], "no model could be loaded"),
        (["generate", "x", "--temp", "1"], "unrecognized arguments"),
        (["generate", "x", "--top_k", "many"], "invalid int value"),
        (["generate", "x", "--top_k", "-1"], "top_k -1 is out of range"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], says: str, capsys: pytest.CaptureFixture) -> None:
    status, out, err = ended(capsys, *argv)
    assert status == 2
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert not out


def test_python_m_llmtrain_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"llmtrain {__version__}\n"
