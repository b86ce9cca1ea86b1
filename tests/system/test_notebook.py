"""docs/notebook.ipynb, cell by cell in a kernel of its own."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.launching import ROOT, long_form, read_json, series


@long_form
def test_the_notebook_trains_on_two_processes_on_one_and_again(
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
    runs = {name: tmp_path / "runs" / name for name in ("notebook", "notebook-2", "recipe")}
    assert {
        name: read_json(folder / "status.json")["state"] for name, folder in runs.items()
    } == dict.fromkeys(runs, "finished")
    processes = {name: read_json(folder / "run.json")["processes"] for name, folder in runs.items()}
    assert processes == {"notebook": 2, "notebook-2": 1, "recipe": 1}
    settings = read_json(runs["notebook"] / "run.json")["settings"]
    assert {settings[name]["value"] for name in ("n_layer", "n_head")} == {2}
    losses = {name: series(folder, "eval/loss") for name, folder in runs.items()}
    assert losses["notebook-2"] == pytest.approx(losses["notebook"], rel=2e-4)
    assert losses["notebook"][60] < 0.8 * losses["notebook"][0]
    (shown,) = notebook.cells[-1].outputs
    assert shown.traceback == [
        "error: unknown flag --n_layers - did you mean --n_layer?; --help lists the flags."
    ]
