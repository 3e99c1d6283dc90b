"""The notebooks run, and their two forms (a script to review, a notebook to open) hold the same cells."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["01_first_steps", "02_gated_delta_rule"]


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_every_notebook_is_listed_here() -> None:
    assert sorted({path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")}) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_hold_the_same_cells(name: str) -> None:
    script, notebook = FOLDER / f"{name}.py", FOLDER / f"{name}.ipynb"
    assert cells(script) == cells(notebook), f"run: jupytext --to ipynb --update notebooks/{name}.py"


@pytest.mark.parametrize("name", NAMES)
def test_no_outputs_are_kept(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_and_draws(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    # Warnings would be the first thing that a reader sees.
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
