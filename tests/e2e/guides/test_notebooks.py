"""Promise: the notebooks run unchanged, cell by cell, with few steps, also in a folder with no other files. They run
one after the other in one kernel, which forgets all names in between but keeps its imports.
"""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
CELL_DEADLINE_S = 400
SHOWN = {"steer_a_run.ipynb": "application/vnd.jupyter.widget-view+json"}
"""Outputs in addition to curves, if not tables."""
FEW_STEPS = {
    "RFTDASK_NOTEBOOK_WARMUP_STEPS": "3",
    "RFTDASK_NOTEBOOK_GRPO_STEPS": "2",
    "PYTHONPATH": str(NOTEBOOKS.parent),
}

# Warnings of the Jupyter client about its own paths and loops.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in FEW_STEPS.items():
            patch.setenv(key, value)
        patch.delenv("MPLBACKEND", raising=False)  # the kernel sets its own
        manager, client = start_new_kernel()
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_runs_from_top_to_bottom(
    name: str, tmp_path_factory: pytest.TempPathFactory, kernel: KernelManager
) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    folder = str(tmp_path_factory.mktemp("empty"))  # the process stays, like the kernel
    here = f"%reset -f\nimport os\nos.environ['RFTDASK_RUNS'] = {folder!r}\nos.chdir({folder!r})\ndel os"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(here))
    client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, km=kernel)
    client.execute()
    client.kc.stop_channels()

    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in shown if output.get("name") == "stderr"], "a newcomer sees no warnings"
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") >= 2, "the curves of the run, and those drawn from its experiences"
    assert SHOWN.get(name, "text/html") in kinds
