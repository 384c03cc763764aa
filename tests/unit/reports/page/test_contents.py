"""Workers of a run. Promises: each has its newest measurement, and time counts once."""

from rftdask.monitor.metrics import MACHINE, MetricsWriter
from rftdask.reports.page.contents import workers_of
from rftdask.reports.run_reader import StageReader
from rftdask.storage import open_storage
from tests.unit.reports.lineage.lineage_cases import make_config


def measured(name: str, *times: float, **metrics: float) -> StageReader:
    storage = open_storage(f"memory://contents-{name}")
    clock = iter([at for at in times for _ in range(2)]).__next__  # one call to write the row, one to put the part
    with MetricsWriter(storage, MACHINE, clock=clock) as rows:
        for at in times:
            rows.write(int(at), {"cpu_cores": at, **metrics}, process="w", host=f"h{at:.0f}")
    return StageReader(make_config("runs", name=name), storage)


def test_workers_show_newest_metrics_and_time_without_pauses() -> None:
    # Two starts: three rows of ten seconds, a pause of an hour, two rows; then the next stage.
    stages = [measured("a", 0.0, 10.0, 20.0, 3620.0, 3630.0, num_gpus=2.0), measured("b", 3640.0, num_gpus=2.0)]
    [worker] = workers_of(stages)
    assert (worker.name, worker.host, worker.seconds, worker.num_gpus) == ("w", "h3640", 40.0, 2)
    assert worker.used == {"cpu_cores": 3640.0, "num_gpus": 2.0} and worker.last_s == 3640.0


def test_a_run_without_measurements_has_no_workers() -> None:
    assert workers_of([]) == workers_of([measured("c")]) == []
