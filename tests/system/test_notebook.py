"""docs/notebook.ipynb, cell by cell in a kernel of its own."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.launching import ROOT, long_form, read_json, series


@long_form
def test_the_notebook_trains_on_two_processes_and_plots_two_runs_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PLATFORM_DIRS": "1",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=150, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=dict(os.environ))
    names = ("notebook", "notebook-2", "notebook-3", "recipe")
    runs = {name: tmp_path / "runs" / name for name in names}
    assert {
        name: read_json(folder / "status.json")["state"] for name, folder in runs.items()
    } == dict.fromkeys(runs, "finished")
    processes = [read_json(folder / "run.json")["processes"] for folder in runs.values()]
    assert processes == [2, 1, 1, 1]
    settings = read_json(runs["notebook"] / "run.json")["settings"]
    assert {settings[name]["value"] for name in ("n_layer", "n_head")} == {2}
    losses = {name: series(folder, "eval/loss") for name, folder in runs.items()}
    assert losses["notebook-2"] == pytest.approx(losses["notebook"], rel=2e-4)
    assert losses["notebook-3"][60] != pytest.approx(losses["notebook-2"][60], rel=2e-3)
    assert losses["notebook"][60] < 0.8 * losses["notebook"][0]

    cells = {cell["id"]: cell for cell in notebook.cells}
    shown_runs = cells["cell-6"].outputs[-1].data["text/plain"].splitlines()
    assert len(shown_runs) == 2
    for line, name in zip(shown_runs, ("notebook-2", "notebook-3"), strict=True):
        assert f"Run('runs/{name}', finished, step 60, eval loss {losses[name][60]:.4f})" in line
    assert "eval/loss" in cells["cell-8"].outputs[-1].data["text/html"]
    assert "image/png" in cells["cell-9"].outputs[-1].data
    shown_result = "".join(output.text for output in cells["cell-11"].outputs if "text" in output)
    assert "AutoModelForCausalLM.from_pretrained" in shown_result
    assert "failed" not in shown_result
    (shown,) = notebook.cells[-1].outputs
    assert shown.traceback == ["error: unknown flag --n_layers: use --n_layer."]
