"""The notebooks run as they are, cell by cell, with few steps, also where nothing but the notebook is."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
CELL_DEADLINE_S = 240
SHOWN = {"steer_a_run.ipynb": "application/vnd.jupyter.widget-view+json"}
"""What one shows beside curves, if no tables."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the Jupyter client, about its own paths and loops
@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFTDASK_RUNS", str(tmp_path))
    monkeypatch.setenv("RFTDASK_NOTEBOOK_WARMUP_STEPS", "3")
    monkeypatch.setenv("RFTDASK_NOTEBOOK_GRPO_STEPS", "2")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel brings its own
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()

    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.get("name") == "stderr"], "a newcomer sees no warnings"
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") >= 2, "the curves of the run, and those drawn from its experiences"
    assert SHOWN.get(name, "text/html") in kinds
