"""Promise: a run on an existing Dask cluster assigns roles to its workers, trains, and leaves the cluster running."""

from pathlib import Path

from distributed import Client, LocalCluster

from tests.integration.run_cases import assert_sound, finish_alone, run_folder, write_config


def test_a_run_uses_an_existing_cluster_and_leaves_it_running(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        finish_alone(config, "cluster.type=existing", f"cluster.options={{address: '{cluster.scheduler_address}'}}")
        assert assert_sound(run_folder(config))["step"] == 10
        with Client(cluster, set_as_default=False) as client:
            assert client.submit(lambda: 1).result(timeout=60) == 1


def test_the_control_role_never_runs_on_an_explorer(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    address = "cluster.options={{address: '{}'}}"
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        where = address.format(cluster.scheduler_address)
        ended = finish_alone(config, "mode=explore", "buffer.total_steps=2", "cluster.type=existing", where)
    assert "every worker is an explorer, which a task may kill: no synchronizer" in ended.out, ended
    assert assert_sound(run_folder(config))["explore_step"] == 2
