"""The trainer works without the lab and its extra. import-linter cannot see what `import_module` imports."""

import sys
from pathlib import Path

from llmtrain.cli import COMMANDS
from tests.launching import BIN, GPT, ROOT, TINY, long_form, metrics, run

BLOCK = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith({names}):
            raise ModuleNotFoundError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""
WITHOUT_LAB = BLOCK.format(names=("llmtrain.lab", "plotly"))
WITHOUT_PLOTLY = BLOCK.format(names=("plotly",))

START_COMMANDS = """
from llmtrain.cli import main

for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code, name
"""


def test_every_command_of_the_trainer_starts_without_the_lab() -> None:
    code = WITHOUT_LAB + START_COMMANDS
    names = [name for name, module in COMMANDS.items() if ".lab." not in module]
    run([sys.executable, "-c", code, *names]).assert_ok()
    assert run([sys.executable, "-c", code, "report"]).status, "the lab is blocked"


@long_form
def test_a_run_trains_without_the_lab_and_a_report_without_plotly_names_the_extra(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    folder = tmp_path / "run"
    (site / "sitecustomize.py").write_text(WITHOUT_LAB)
    env = {"PYTHONPATH": f"{site}:{ROOT}"}
    flags = [*TINY, "--eval_fraction", "0", "--output_dir", str(folder)]
    run([sys.executable, GPT, *flags], env).assert_ok()
    assert [entry["step"] for entry in metrics(folder) if "train/loss" in entry] == [*range(1, 7)]

    (site / "sitecustomize.py").write_text(WITHOUT_PLOTLY)
    ended = run([str(BIN / "llmtrain"), "report", str(folder)], env)
    assert (ended.status, ended.out) == (2, "")
    assert "pip install 'llmtrain[lab]'" in ended.err
