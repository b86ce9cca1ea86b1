"""docs/notebook.ipynb, run cell by cell in a new kernel."""

import os
from pathlib import Path
from typing import NamedTuple

import nbclient
import nbformat
import pytest

from tests.launching import ROOT, long_form, read_json, series

LAST_STEP = 60


class RunNotebook(NamedTuple):
    """The notebook after all its cells have run.

    Attributes:
        cells: the cells by id.
        runs: the folders of its runs by name: on two processes ("notebook"), the same on one
            process, with another learning rate, and of a recipe of the package.
    """

    cells: dict[str, nbformat.NotebookNode]
    runs: dict[str, Path]

    def eval_losses(self, name: str) -> dict[int, float]:
        return series(self.runs[name], "eval/loss")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> RunNotebook:
    folder = tmp_path_factory.mktemp("notebook")
    content = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(content, timeout=150, resources=resources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("HOME", str(folder))
        client.execute(env=dict(os.environ))

    names = ("notebook", "notebook-2", "notebook-3", "recipe")
    return RunNotebook(
        cells={cell["id"]: cell for cell in content.cells},
        runs={name: folder / "runs" / name for name in names},
    )


@long_form
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param("notebook", 2, id="on two processes"),
        pytest.param("notebook-2", 1, id="in the notebook"),
        pytest.param("notebook-3", 1, id="with another learning rate"),
        pytest.param("recipe", 1, id="of a recipe"),
    ],
)
def test_each_run_of_the_notebook_finishes(
    name: str, processes: int, notebook: RunNotebook
) -> None:
    folder = notebook.runs[name]
    assert read_json(folder / "status.json")["state"] == "finished"
    assert read_json(folder / "run.json")["processes"] == processes


@long_form
def test_settings_that_are_made_in_a_cell_are_recorded(notebook: RunNotebook) -> None:
    settings = read_json(notebook.runs["notebook"] / "run.json")["settings"]
    assert settings["n_layer"]["value"] == 2
    assert settings["n_head"]["value"] == 2


@long_form
def test_a_run_learns_the_same_on_two_processes_and_on_one(notebook: RunNotebook) -> None:
    losses = notebook.eval_losses("notebook")
    losses_on_one_process = notebook.eval_losses("notebook-2")
    assert losses[LAST_STEP] < 0.8 * losses[0]
    assert losses_on_one_process == pytest.approx(losses, rel=2e-4)


@long_form
def test_a_run_with_another_learning_rate_has_another_loss(notebook: RunNotebook) -> None:
    loss = notebook.eval_losses("notebook-2")[LAST_STEP]
    other_loss = notebook.eval_losses("notebook-3")[LAST_STEP]
    assert other_loss != pytest.approx(loss, rel=5e-4)


@long_form
def test_a_cell_shows_a_run_as_one_line(notebook: RunNotebook) -> None:
    lines = notebook.cells["cell-6"].outputs[-1].data["text/plain"].splitlines()

    assert len(lines) == 2
    for line, name in zip(lines, ("notebook-2", "notebook-3"), strict=True):
        loss = notebook.eval_losses(name)[LAST_STEP]
        assert f"Run('runs/{name}', finished, step 60, eval loss {loss:.4f})" in line


@long_form
def test_the_history_is_a_table_and_a_plot(notebook: RunNotebook) -> None:
    assert "eval/loss" in notebook.cells["cell-8"].outputs[-1].data["text/html"]
    assert "image/png" in notebook.cells["cell-9"].outputs[-1].data


@long_form
def test_a_recipe_shows_its_result_in_a_cell(notebook: RunNotebook) -> None:
    outputs = notebook.cells["cell-11"].outputs
    text = "".join(output.text for output in outputs if "text" in output)
    assert "AutoModelForCausalLM.from_pretrained" in text
    assert "failed" not in text


@long_form
def test_a_mistake_in_a_cell_is_an_error_of_one_line(notebook: RunNotebook) -> None:
    last_cell = [*notebook.cells.values()][-1]
    (error,) = last_cell.outputs
    suggestion = "did you mean --n_layer? --help lists the flags."
    assert error.traceback == [f"error: unknown flag --n_layers - {suggestion}"]
