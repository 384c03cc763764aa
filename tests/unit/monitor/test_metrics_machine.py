"""Machine metrics. Promises: each worker with measurements has its own rows, which become rarer over time."""

from typing import Any

from rftdask.monitor.metrics import MACHINE, MachineLog, read_metrics
from rftdask.processes.gpus import METER
from rftdask.storage.memory import MemoryStorage

WORKERS: dict[str, Any] = {
    "tcp://1": {"name": "trainer-0", "host": "10.0.0.1", "metrics": {METER: {"cpu_cores": 1.5}, "cpu": 3}},
    "tcp://2": {"name": 7, "host": "10.0.0.2", "metrics": {METER: {"cpu_cores": 0.5, "gpu_busy": 0.25}}},
    "tcp://3": {"name": "new", "host": "10.0.0.2", "metrics": {METER: {}}},
    "tcp://4": {"name": "else", "host": "10.0.0.3", "metrics": {}},
}


def test_each_worker_has_its_own_row() -> None:
    storage, now = MemoryStorage("memory://machines"), [1000.0]
    log = MachineLog(storage, lambda: now[0])
    log.note(WORKERS)
    now[0] += 1
    log.note(WORKERS)  # too soon
    log.close()
    rows = read_metrics(storage)
    assert rows[["role", "process", "host", "cpu_cores"]].values.tolist() == [
        [MACHINE, "trainer-0", "10.0.0.1", 1.5],
        [MACHINE, "7", "10.0.0.2", 0.5],
    ]


def test_a_week_of_many_workers_has_few_rows() -> None:
    storage, now = MemoryStorage("memory://machines-week"), [1000.0]
    log = MachineLog(storage, lambda: now[0])
    workers = {f"tcp://{n}": WORKERS["tcp://1"] | {"name": f"w{n}"} for n in range(100)}
    while now[0] < 7 * 86400:
        log.note(workers)
        now[0] += 600
    log.close()
    assert 5_000 < len(read_metrics(storage)) < 100_000
