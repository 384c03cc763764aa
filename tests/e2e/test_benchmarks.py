"""Promises of every script in benchmarks/: --quick (--tiny of GPU scripts) succeeds with the packages of CI, and --json
writes the rows that benchmarks/report.py describes. Speed is not checked. Scripts whose quick form takes minutes are
marked long.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rftdask.run.run_folder import note_begin
from rftdask.storage import open_storage
from rftdask.synchronizer.manifest import NAME as MANIFEST
from rftdask.synchronizer.published import WEIGHTS_POINTER

FOLDER = Path(__file__).parents[2] / "benchmarks"
PARTS_OF_GPU = {"gpu_train"}
"""Modules that gpu.py runs."""
NAMES = sorted({path.stem for path in FOLDER.glob("*.py") if "\nif __name__ ==" in path.read_text()} - PARTS_OF_GPU)
SHORT = ("chaos", "rollouts", "serve", "sizes", "tolerances", "weight_arithmetic")
"""Scripts whose quick form is short or is promised to run in CI."""
PARTS = "abcdefghij"
DEADLINE_S = 900.0
NUMBERS, TEXTS = ("ours", "other", "ratio", "goal"), ("work", "unit", "against")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in NAMES]
)
def test_a_quick_run_ends_well_and_writes_its_rows(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    quick = "--tiny" if name.startswith("gpu") else "--quick"
    command = [sys.executable, str(FOLDER / f"{name}.py"), quick, "--json", str(file)]
    if name == "gpu":  # several commands append to its table
        command += ["--append", str(tmp_path / "gpu.md"), "--parts", *PARTS]
    if name == "race":
        command += ["--curves", str(tmp_path / "curves.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    written = json.loads(file.read_text())
    assert (written["benchmark"], written["quick"]) == (name, True)
    assert written["rows"]
    for row in written["rows"]:
        assert row.keys() == {*NUMBERS, *TEXTS, "less_is_better", "goal_of"}
        assert row["work"] and row["unit"] and all(isinstance(row[key], str) for key in TEXTS)
        assert isinstance(row["ours"], int | float) and isinstance(row["less_is_better"], bool)
        assert all(row[key] is None or math.isfinite(row[key]) for key in NUMBERS)
        assert (row["ratio"] is not None) == bool(row["against"])
        assert row["goal_of"] in ("ours", "ratio")
    assert len({(row["work"], row["unit"], row["against"]) for row in written["rows"]}) == len(written["rows"])
    if name == "gpu":
        table = (tmp_path / "gpu.md").read_text().splitlines()
        assert {line[2] for line in table if line[2] in PARTS} == set(PARTS)
        assert table[:2] == ["| part | what | found | bound |", "|---|---|---|---|"]
        assert all(line.count("|") == 5 for line in table)
    if name == "race":
        assert "bare loop" in (tmp_path / "curves.svg").read_text()
    if name == "chaos":  # the short form of the promise of docs/reliability.md about a run with kills of every role
        assert "5 kills (1 x driver, 1 x engine, 1 x explorer worker, 1 x trainer, 1 x trainer worker)" in done.stdout
        assert "0 lost, 0 twice, the same ledger, the same bits of weights" in done.stdout


def test_kills_are_counted_over_calls_by_process_and_phase(tmp_path: Path) -> None:
    runs = [{"kills": [["engine", "saving"], ["driver", "starting"]], "problems": []}]
    runs += [{"kills": [["engine", "saving"]], "problems": ["lost: 1"]}]
    lines = [json.dumps({"seed": seed, "wall_s": 1.0, **run}) for seed, run in enumerate(runs, start=1)]
    (tmp_path / "kills.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, str(FOLDER / "chaos.py"), "--until", "3", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    table = {line[:16].strip(): line[16:].split() for line in done.stdout.splitlines()}
    assert table["killed while"] == ["starting", "exploring", "training", "publishing", "saving", "total"], done
    assert (table["engine"], table["driver"]) == (["0", "0", "0", "0", "2", "2"], ["1", "0", "0", "0", "0", "1"])
    assert table["total"] == ["1", "0", "0", "0", "2", "3"]
    assert done.returncode == 1 and "seed 2: lost: 1" in done.stdout
    for _ in range(2):
        done = subprocess.run([*command, "--steps", "7"], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 1 and "was begun with other options" in done.stderr


def test_the_phase_of_a_run_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from chaos_runs import phase_of

    storage, phases = open_storage(tmp_path), [phase_of(tmp_path)]
    storage.put("experiences/000000/of-an-earlier-driver.parquet", b"")
    os.utime(tmp_path / "experiences/000000/of-an-earlier-driver.parquet", (1.0, 1.0))
    note_begin(storage)
    phases.append(phase_of(tmp_path))
    files = ("experiences/000000/1.parquet", "ledger/main/00000001.json", "weights/1/model.safetensors")
    for path in (*files, "global_step_1/actor/model.safetensors", f"global_step_1/{MANIFEST}"):
        storage.put(path, b"")
        phases.append(phase_of(tmp_path))
    storage.put(WEIGHTS_POINTER, b"1")
    phases.append(phase_of(tmp_path))
    order = ["exploring", "training", "publishing", "saving", "publishing", "exploring"]
    assert phases == ["starting", "starting", *order]


@pytest.mark.long
def test_a_hanging_gpu_part_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    """Part j is a run that takes longer than the limit and has child processes."""
    mark = {**os.environ, "RFTDASK_TEST_MARK": str(tmp_path)}
    command = [
        sys.executable,
        str(FOLDER / "gpu.py"),
        "--tiny",
        "--append",
        "gpu.md",
        "--limit",
        "8",
        "--parts",
        "j",
        "a",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, env=mark)
    assert done.returncode == 1, (done.stdout[-4000:], done.stderr[-4000:])
    rows = (tmp_path / "gpu.md").read_text().splitlines()[3:]
    assert "| j | the part itself | ended after 8 s | ends BROKEN |" in rows
    assert any(row.startswith("| a | sum over a group of one") and "holds" in row for row in rows)
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("RFTDASK_TEST_MARK") == str(tmp_path) and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=30)  # workers notice that their parent has gone
    assert [process.cmdline() for process in alive] == []


def test_gpu_rows_are_in_the_table_when_the_machine_is_lost(tmp_path: Path) -> None:
    table = tmp_path / "gpu.md"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--tiny", "--append", str(table), "--parts", "a", "j"]
    deadline = time.monotonic() + DEADLINE_S
    with (
        # Killed processes leave their folders behind; a short name, for the sockets of Python's fork server.
        tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as left,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, cwd=tmp_path, env={**os.environ, "TMPDIR": left}
        ) as script,
    ):
        try:
            while not (table.exists() and "| a |" in table.read_text()):
                assert script.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            all_of_it: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):  # it has ended, which the assertion above reports
                all_of_it = [*psutil.Process(script.pid).children(recursive=True), psutil.Process(script.pid)]
            for process in all_of_it:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.mark.long
def test_gpu_parts_report_what_they_omit_without_peft(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['peft'] = None\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(FOLDER / "gpu.py"), "--tiny", "--append", "gpu.md", "--parts", "a", "f"]
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path, env=env)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    rows = [line for line in (tmp_path / "gpu.md").read_text().splitlines() if line.startswith("| f |")]
    assert any("LoRA | skipped: peft is not installed here" in row for row in rows)
    assert any("full" in row for row in rows)
