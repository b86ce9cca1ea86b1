"""docs/guides/inspecting-runs.md shows what its commands print. LLMTRAIN_WRITE_DOCS=1 writes it there instead."""

import os
import re
from pathlib import Path

from tests.launching import BIN, ROOT, WRITE_DOCS, Ended, long_form, run

HOME = "/home/me"  # on the page
PAGE = ROOT / "docs" / "guides" / "inspecting-runs.md"


def comparable(text: str) -> list[str]:
    """Without numbers, what a machine has of its own (its threads), and the text of a row.

    Which metrics leave their tolerance after the first difference, and which of them first, depends on
    how a machine rounds: of that line, only the beginning is compared.
    """
    lines = [
        re.sub(r'"(?:[^"\\]|\\.)*"?$', "TEXT", line)
        for line in text.splitlines()
        if "threads" not in line
    ]
    lines = [re.sub(r"\d ms\b", "0 s", line) for line in lines]  # seconds on a slower machine
    lines = [re.sub(r"^(then +loss at step \d+).*", r"\1", line) for line in lines]
    return [" ".join(re.sub(r"[\d.,]+(e-\d+)?", "#", line).split()) for line in lines]


@long_form
def test_the_page_about_runs_shows_what_its_commands_print(tmp_path: Path) -> None:
    page = PAGE.read_text()
    for name in ("recipes", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "small.yaml").write_text(settings)
    (made,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "WANDB_MODE": "offline"}

    def printed(command: str) -> Ended:
        return run(["bash", "-ec", f"cd {tmp_path}; {command}"], environment)

    printed(made).assert_ok()
    for block in re.finditer(r"```\n\$ (.*)\n((?:.*\n)*?)```\n", page):
        done = printed(block[1])
        assert done.status == (1 if " diff " in block[1] else 0), done.err
        if WRITE_DOCS:
            PAGE.write_text(
                PAGE.read_text().replace(
                    block[0], f"```\n$ {block[1]}\n{done.out.replace(str(tmp_path), HOME)}```\n"
                )
            )
        elif block[1] != "llmtrain doctor":
            assert comparable(done.out) == comparable(block[2])
        else:
            assert [line.split()[1] for line in done.out.splitlines()] == [
                line.split()[1] for line in block[2].splitlines()
            ]
