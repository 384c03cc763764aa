"""What every test run needs before the first import: few threads, no network, a quiet Dask, and tiers by folder.

    tests/unit           pure rules, milliseconds
    tests/crash          a run killed, unplugged and damaged; the quick sample in seconds, the short forms marked slow
    tests/integration    a real Dask cluster in this process or on this machine, seconds
    tests/e2e            real runs and processes killed mid-write; marked slow below, so that none is forgotten
    tests/e2e/guides     what a user walks through: examples, notebooks, pages, the wheel; marked guides instead
    tests/robustness     bad settings, files, folders, code and words; marked robustness below, a tier of its own
    tests/learning       every algorithm learns its toy, in one process; marked learning below, a tier of its own
    tests/vllm_engine    vLLM on the CPU, minutes, in an environment of its own; marked vllm below
    tests/gpu            what only a GPU shows, minutes; marked gpu below

The variables are set in the environment, not in the libraries: the processes that tests start must see them too.
"""

import gc
import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

# One thread each: several workers share two cores. Numeric tests hold for any number; see CONTRIBUTING.
THREADS = os.environ.get("RFTDASK_TEST_THREADS", "1")
ENVIRONMENT = {
    "OMP_NUM_THREADS": THREADS,
    "MKL_NUM_THREADS": THREADS,
    "OPENBLAS_NUM_THREADS": THREADS,
    "TOKENIZERS_PARALLELISM": "false",
    # A test that would download something fails at once, with the name of what it wanted.
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "MPLBACKEND": "agg",
    # The periodic self-observation of in-process workers costs more CPU than the tests.
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL": "1h",
    "DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__GIL__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "1s",
}
os.environ.update(ENVIRONMENT)
# Where it is set, as in many containers, each of the hundreds of processes that tests start compiles the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests write thousands of small files, each synced before it has its name: on a disk they wait for that much of their
# time. A kill takes nothing from memory either, and power losses are simulated (tests/crash).
MEMORY = Path("/dev/shm")
# Some tests write programs, which a file system may not let run.
runs_programs = not (MEMORY.is_dir() and os.statvfs(MEMORY).f_flag & os.ST_NOEXEC)
if os.access(MEMORY, os.W_OK) and runs_programs and shutil.disk_usage(MEMORY).free >= 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Ignored where tests run in the background of a script or under nohup, and then by every process that they start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "test_slurm_runs.py",
    "test_runs_on_s3.py",
    "test_benchmarks.py",
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
"""The slow files that take longest; a long test that begins last leaves the other cores idle."""
TIERS = {
    "e2e/guides": "guides",
    "e2e": "slow",
    "vllm_engine": "vllm",
    "robustness": "robustness",
    "learning": "learning",
    "gpu": "gpu",
}
"""The marker that every test in a folder has; the first folder that a file is in counts."""
SLOW_TIMEOUT_S = 1500
"""Of a test of real runs, whose every wait has its own deadline: some minutes, on a machine that does much else."""

# No deadline: a slow machine is not a wrong result. In CI the examples are the same in every run.
settings.register_profile("rftdask", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rftdask")


@pytest.hookimpl(optionalhook=True)  # the environment of vLLM has no xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For two cores three processes, and five in the slow tier: a real run waits for its own processes a third of its
    time, a slow one more than half of it. A fourth gains nothing in the fast one: what it waits less, it imports.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, 5 * cores // 2 if config.getoption("dist") == "loadgroup" else 3 * cores // 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files in which -m can choose nothing, whose imports take each process half a minute in all: no
    subset of the markers that are written in one, with that of its folder, fits.
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


@pytest.hookimpl(tryfirst=True)  # before -m decides what runs, and before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaves_out_extras = "extras" not in config.option.markexpr
    for item in items:
        if leaves_out_extras and item.get_closest_marker("extras"):
            # Skipped, not deselected, so that the summary counts them; also where the packages happen to be there.
            item.add_marker(pytest.mark.skip(reason="needs more than the default extras; `make extras` runs it"))
        if tier := tier_of(item.path):
            item.add_marker(tier)
        if item.get_closest_marker("slow") or item.get_closest_marker("guides"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    if getattr(config.option, "loadgroup", False):
        # Tests that share a fixture of their module stay together; all others are dealt out one by one.
        for item in items:
            if isinstance(item, pytest.Function) and shares_a_fixture(item):
                item.add_marker(pytest.mark.xdist_group(item.path.name))
        ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    else:
        items[:] = deal(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.path.is_relative_to(TESTS / "e2e") for item in session.items):
        # Whichever run in this process is the first, theirs need all of it.
        from rftdask.cluster.layout import WORKER_IMPORTS  # late: libraries read the variables above
        from rftdask.processes.fork_server import start_fork_server  # late: as above
        from rftdask.processes.zygote import TOKENIZERS  # late: as above

        start_fork_server((*WORKER_IMPORTS, *TOKENIZERS))
    # What was imported stays: without this each full collection looks at all of torch again, 5 % of the fast tests.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else DuckDB takes what is left at the end of the process for leaks, and prints them


def pytest_runtest_setup(item: pytest.Item) -> None:
    grouped = getattr(item.config.option, "loadgroup", False) and item.get_closest_marker("xdist_group")
    if grouped and "@" not in item.nodeid.rpartition("]")[2]:
        pytest.fail(
            "with this pytest this pytest-xdist does not hold the tests of a group together, and is silent about it"
        )


def tier_of(path: Path) -> str | None:
    return next((marker for folder, marker in TIERS.items() if path.is_relative_to(TESTS / folder)), None)


def deal(items: list[pytest.Item]) -> list[pytest.Item]:
    """The files by turns: one whose tests wait for real runs, then one whose tests compute, each the largest first.

    So they keep the cores busy together. By themselves the few tests of the runs would come last, and the cores idle.
    """
    waiting, computing = list[list[pytest.Item]](), list[list[pytest.Item]]()
    for path, tests in itertools.groupby(items, key=lambda item: item.path):
        (waiting if path.is_relative_to(TESTS / "integration") else computing).append(list(tests))
    by_size = (sorted(files, key=len, reverse=True) for files in (waiting, computing))
    turns = itertools.zip_longest(*by_size, fillvalue=list[pytest.Item]())
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(turns)))


def shares_a_fixture(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(definition[-1].scope in ("class", "module") for definition in definitions)
