"""docs/notebook.ipynb, run cell by cell in a new kernel."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.launching import ROOT, long_form, read_json, series

LAST_STEP = 60


@long_form
def test_the_notebook_makes_its_runs_and_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(content, timeout=150, resources=resources)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    client.execute(env=dict(os.environ))

    processes = {"notebook": 2, "notebook-2": 1, "notebook-3": 1, "recipe": 1}
    for name, count in processes.items():
        folder = tmp_path / "runs" / name
        assert read_json(folder / "status.json")["state"] == "finished"
        assert read_json(folder / "run.json")["processes"] == count

    on_two, on_one, with_another_rate = [
        series(tmp_path / "runs" / name, "eval/loss")
        for name in ("notebook", "notebook-2", "notebook-3")
    ]
    assert on_two[LAST_STEP] < 0.8 * on_two[0]
    assert on_one == pytest.approx(on_two, rel=2e-4)
    assert with_another_rate[LAST_STEP] != pytest.approx(on_one[LAST_STEP], rel=5e-4)

    cells = {cell["id"]: cell for cell in content.cells}
    lines = cells["cell-6"].outputs[-1].data["text/plain"].splitlines()
    assert len(lines) == 2
    assert f"finished, step 60, eval loss {on_one[LAST_STEP]:.4f}" in lines[0]
    assert "eval/loss" in cells["cell-8"].outputs[-1].data["text/html"]
    assert "image/png" in cells["cell-9"].outputs[-1].data
    [error] = content.cells[-1].outputs
    [line] = error.traceback
    assert line.startswith("error: unknown flag --n_layers - did you mean --n_layer?")
