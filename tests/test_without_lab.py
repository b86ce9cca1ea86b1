"""The trainer works without the lab. import-linter cannot see what `import_module` imports."""

import sys

from llmtrain.cli import COMMANDS
from tests.launching import run

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("llmtrain.lab"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from llmtrain.cli import main

for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code, name
"""


def test_every_command_of_the_trainer_starts_without_the_lab() -> None:
    names = [name for name, command in COMMANDS.items() if ".lab." not in command.module]
    run([sys.executable, "-c", BLOCKED, *names]).assert_ok()
    assert run([sys.executable, "-c", BLOCKED, "report"]).status, "the lab is blocked"
