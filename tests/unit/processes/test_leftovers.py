"""Semaphores in /dev/shm: those of living processes are kept, those of killed ones removed."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.synchronize import Lock
from pathlib import Path

import psutil
import pytest

from rftdask.processes.leftovers import abandoned_semaphores, remove_abandoned_semaphores

SHARED = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm on this system")


def path_of(lock: Lock) -> Path:
    return SHARED / f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]


def test_only_semaphores_that_no_process_maps_are_removed() -> None:
    held = multiprocessing.get_context("spawn").Lock()
    abandoned = SHARED / f"sem.mp-test{os.getpid()}"
    abandoned.write_bytes(bytes(32))
    try:
        found = abandoned_semaphores(min_age_s=-1.0)
        assert abandoned in found and path_of(held) not in found
        assert abandoned not in abandoned_semaphores(min_age_s=3600.0), "a young one may not be mapped yet"
    finally:
        abandoned.unlink()


def test_the_semaphore_of_a_killed_process_is_removed() -> None:
    code = (
        "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock(); "
        "print(lock._semlock.name, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            path = SHARED / f"sem.{process.stdout.readline().strip().lstrip('/')}"
            assert path.exists() and path not in abandoned_semaphores(min_age_s=-1.0)
            for tracker in psutil.Process(process.pid).children():  # it would remove the semaphore
                tracker.kill()
        finally:
            process.kill()
    assert path in abandoned_semaphores(min_age_s=-1.0)
    path.unlink()


def test_removal_takes_only_the_semaphores(tmp_path: Path) -> None:
    for name in ("sem.mp-a", "sem.other", "psm_1"):
        (tmp_path / name).touch()
    remove_abandoned_semaphores(tmp_path, min_age_s=-1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["psm_1", "sem.other"]
