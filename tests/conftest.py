"""Set-up of every test run before the first import: few threads, no network, quiet Dask, and markers by folder.

    tests/unit           pure rules, milliseconds
    tests/crash          a run killed, cut off and damaged; marked slow below
    tests/integration    a real Dask cluster in this process or on this machine; marked slow below, except SMOKE
    tests/e2e            real runs and processes killed mid-write; marked slow below
    tests/e2e/guides     examples, notebooks, pages and the wheel as users run them; marked guides instead
    tests/robustness     bad settings, files, folders, code and words; marked robustness below
    tests/learning       every algorithm learns its toy, in one process; marked learning below
    tests/vllm_engine    vLLM on the CPU, minutes, in an environment of its own; marked vllm below
    tests/gpu            parts of `make gpu`, minutes; marked gpu below

The variables are set in the environment, not in the libraries, because the processes that tests start must see them.
"""

import gc
import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

from tests.session_report import SessionReport

# One thread each, because several workers share two cores. Numeric tests hold for any number; see CONTRIBUTING.
THREADS = os.environ.get("RFTDASK_TEST_THREADS", "1")
ENVIRONMENT = {
    "OMP_NUM_THREADS": THREADS,
    "MKL_NUM_THREADS": THREADS,
    "OPENBLAS_NUM_THREADS": THREADS,
    "TOKENIZERS_PARALLELISM": "false",
    # A test that tries to download something fails at once with the name of the file.
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "MPLBACKEND": "agg",
    # The periodic self-monitoring of in-process workers costs more CPU than the tests.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "1h",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}
os.environ.update(ENVIRONMENT)
# If it is set, as in many containers, each of the hundreds of processes that tests start compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests write thousands of small files with fsync, which takes most of their time on a disk. A kill does not lose files
# in memory, and power losses are simulated (tests/crash).
MEMORY = Path("/dev/shm")
# Some tests write programs, which the file system must allow to run.
runs_programs = not (MEMORY.is_dir() and os.statvfs(MEMORY).f_flag & os.ST_NOEXEC)
if os.access(MEMORY, os.W_OK) and runs_programs and shutil.disk_usage(MEMORY).free >= 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A slow disk, for tests/steady.py.
if delay_s := float(os.environ.get("RFTDASK_TEST_FSYNC_S", "0")):
    fsync = os.fsync

    def slow_fsync(file: int) -> None:
        time.sleep(delay_s)
        fsync(file)

    os.fsync = slow_fsync

# A script or nohup may have ignored the signal, and every process that the tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "test_slurm_runs.py",
    "test_runs_on_s3.py",
    "test_benchmarks.py",
    "test_weight_methods.py",
    "test_load_sizes.py",
    "test_stopped_runs.py",
    "test_bit_exact_resume.py",
    "test_ranks_agree.py",
    "test_colocated_runs.py",
    "test_compiled_layers.py",
    "test_wheel.py",
    "test_elastic_runs.py",
    "test_crash_short.py",
    "test_lost_roles.py",
    "test_killed_ranks.py",
    "test_notebooks.py",
    "test_real_data.py",
)
"""Slow files that take longest; starting a long test last leaves the other cores idle."""
TIERS = {
    "e2e/guides": "guides",
    "e2e": "slow",
    "integration": "slow",
    "crash": "slow",
    "vllm_engine": "vllm",
    "robustness": "robustness",
    "learning": "learning",
    "gpu": "gpu",
}
"""Marker of every test in a folder; the first matching folder counts."""
SMOKE = TESTS / "integration/folders/test_experiment.py"
"""Whole runs in the fast tests, as a sample."""
SLOW_TIMEOUT_S = 1500
"""Timeout of tests with real runs, whose waits have their own deadlines: a few minutes on a busy machine."""

# No deadline, because a slow machine is not a wrong result. In CI the examples are the same in every run.
settings.register_profile("rftdask", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rftdask")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process of xdist
        config.pluginmanager.register(SessionReport(config))


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes: three for two cores, and five in the slow tier.

    A real run waits for its own processes a third of its time, a slow one more than half. A fourth process gains
    nothing in the fast tier, because imports use the time it saves.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, 5 * cores // 2 if config.getoption("dist") == "loadgroup" else 3 * cores // 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files from which -m can select nothing; their imports cost each process half a minute in total. A file is
    skipped if no subset of the markers in its text, with that of its folder, matches the expression.
    """
    if collection_path.suffix != ".py" or not config.option.markexpr:
        return None
    chosen = Expression.compile(config.option.markexpr)
    text = collection_path.read_text()
    names = [line.partition(":")[0] for line in config.getini("markers")]
    written = [name for name in names if f"mark.{name}" in text]
    always = [tier] if (tier := tier_of(collection_path)) else []
    subsets = itertools.product(*([[], [name]] for name in written))
    fits = (chosen.evaluate({*always, *itertools.chain(*subset)}.__contains__) for subset in subsets)
    return None if any(fits) else True


@pytest.hookimpl(tryfirst=True)  # before -m selects tests, and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaves_out_extras = "extras" not in config.option.markexpr  # `make long` names it, and so runs them
    for item in items:
        if leaves_out_extras and item.get_closest_marker("extras"):
            # Skipped, not deselected, so that the summary counts them, even if the packages are installed.
            item.add_marker(pytest.mark.skip(reason="needs more than the default extras; `make extras` runs it"))
        if tier := tier_of(item.path):
            item.add_marker(tier)
        if item.get_closest_marker("slow") or item.get_closest_marker("guides"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if getattr(config.option, "loadgroup", False):
        # Tests that share a module fixture stay together; all others are distributed individually.
        for item in items:
            if isinstance(item, pytest.Function) and shares_a_fixture(item):
                item.add_marker(pytest.mark.xdist_group(item.path.name))
        ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    else:
        items[:] = deal(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.path.is_relative_to(TESTS / "e2e") for item in session.items):
        # The first one to run in this process needs all of this.
        from rftdask.cluster.layout import WORKER_IMPORTS  # late: libraries read the variables above
        from rftdask.processes.fork_server import start_fork_server  # late: as above
        from rftdask.processes.zygote import TOKENIZERS  # late: as above

        start_fork_server((*WORKER_IMPORTS, *TOKENIZERS))
    # Freeze imported objects: otherwise each full collection scans all of torch, 5 % of the time of the fast tests.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise DuckDB reports the remaining objects as leaks at the end of the process


def pytest_runtest_setup(item: pytest.Item) -> None:
    grouped = getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group")
    if grouped and "@" not in item.nodeid.rpartition("]")[2]:
        pytest.fail(
            "with this pytest this pytest-xdist does not hold the tests of a group together, and is silent about it"
        )


def tier_of(path: Path) -> str | None:
    if path == SMOKE:
        return None
    return next((marker for folder, marker in TIERS.items() if path.is_relative_to(TESTS / folder)), None)


def deal(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order the files, so that the sample of whole runs comes first and then the files with most tests; otherwise cores
    would idle at the end. RFTDASK_TEST_ORDER, a number, shuffles the files instead.
    """
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    if seed := os.environ.get("RFTDASK_TEST_ORDER"):
        random.Random(seed).shuffle(files)
    else:
        files.sort(key=lambda tests: (tests[0].path != SMOKE, -len(tests)))
    return list(itertools.chain.from_iterable(files))


def shares_a_fixture(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(definition[-1].scope in ("class", "module") for definition in definitions)
