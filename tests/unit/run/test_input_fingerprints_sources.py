"""The sources of a run are the user's modules and what these import; jobs import the submitted copies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftdask.cluster.secrets_dir import SecretsDir
from rftdask.cluster.slurm import controller_text
from rftdask.config import Config, load_config
from rftdask.config.plugins import SUBMITTED
from rftdask.run.input_fingerprints import copy_for_jobs, find_sources, git_states
from rftdask.storage import open_storage
from tests.integration.run_cases import write_config

PLUGIN = """
import json, numpy
from pathlib import Path
from {name}_scale import FACTOR

def scored(response, truth, task):
    from {name}_pkg.deep import BONUS
    return FACTOR + BONUS + float(Path(__file__).with_name("{name}_data.txt").read_text())
"""


class World:
    """A plug-in folder whose module imports another one there, and a package of elsewhere on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.name = f"src_{abs(hash(folder))}"  # a module is imported once in a process
        self.plugins, self.library = folder / "plugins", folder / "library"
        package = self.library / f"{self.name}_pkg"
        self.plugins.mkdir()
        package.mkdir(parents=True)
        (self.plugins / f"{self.name}.py").write_text(PLUGIN.format(name=self.name))
        (self.plugins / f"{self.name}_scale.py").write_text("FACTOR = 1.0")
        (self.plugins / f"{self.name}_data.txt").write_text("0.25")
        (package / "__init__.py").write_text("")
        (package / "deep.py").write_text("from . import shared\nBONUS = shared.BONUS\n")
        (package / "shared.py").write_text("BONUS = 0.5")
        (package / "unused.py").write_text("")
        reward = f"buffer.explorer_input.taskset.default_reward_fn_type={self.name}.scored"
        self.config = load_config(write_config(folder), (f"explorer.plugin_dirs=[{self.plugins}]", reward))

    def edit(self) -> None:
        for file in (*self.plugins.glob("*.py"), *self.library.rglob("*.py")):
            file.write_text(
                file.read_text().replace("1.0", "7.00").replace("0.5", "7.00")
            )  # another size: Python would trust its cache


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(tmp_path)
    monkeypatch.syspath_prepend(str(world.library))
    return world


def scores(world: World, **environment: str) -> float:
    """Reward in another process."""
    code = (
        "import sys; from rftdask.config.plugins import find_part; "
        "print(find_part('reward', sys.argv[1], {}, sys.argv[2:])(1, 2, 3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{world.name}.scored", str(world.plugins)],
        env={**os.environ, "PYTHONPATH": f"{world.library}:{os.getcwd()}", **environment},
        cwd=world.library,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def test_sources_include_imports_of_the_users_code(world: World) -> None:
    found = find_sources(world.config, ())
    parts = ("", "_pkg", "_pkg.deep", "_pkg.shared", "_scale")
    assert list(found) == [f"{world.name}{part}" for part in parts]
    assert found[f"{world.name}_pkg.shared"] == world.library / f"{world.name}_pkg" / "shared.py"


@pytest.mark.slow
def test_jobs_import_the_submitted_sources(world: World, tmp_path: Path) -> None:
    sources = find_sources(world.config, ())
    copies = tmp_path / "copies"
    copy_for_jobs(sources, world.config.explorer.plugin_dirs, copies)
    world.edit()
    assert scores(world) == 14.25
    assert scores(world, **{SUBMITTED: str(copies)}) == 1.75
    copy_for_jobs(sources, world.config.explorer.plugin_dirs, copies)
    assert scores(world, **{SUBMITTED: str(copies)}) == 14.25, "a submission replaces the one before"
    (world.plugins / f"{world.name}.py").unlink()
    assert scores(world, **{SUBMITTED: str(copies)}) == 14.25


def test_every_script_names_the_copies(tmp_path: Path) -> None:
    config: Config = load_config(write_config(tmp_path))
    storage = open_storage(config.checkpoint_job_dir)
    folder = SecretsDir.base_of(config, storage)
    line = f"export {SUBMITTED}={folder.path}/sources"
    text = controller_text(config, folder, storage).splitlines()
    assert text.index(line) < next(number for number, said in enumerate(text) if "-m rftdask run" in said)


def test_git_states_have_commit_and_dirtiness(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    files = list(find_sources(world.config, ()).values())
    assert git_states(files) == {}, "no repository"

    def git(*words: str) -> str:
        me = ("-c", "user.name=me", "-c", "user.email=me@here")
        done = subprocess.run(["git", *me, *words], cwd=world.plugins, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert git_states(files) == {}, "no commit"
    git("commit", "-q", "--allow-empty", "-m", "nothing")
    top = str(world.plugins)
    assert git_states(files) == {top: {"commit": git("rev-parse", "HEAD"), "is_dirty": True}}, "they are not in it"
    git("add", ".")
    git("commit", "-q", "-m", "all")
    clean = {top: {"commit": git("rev-parse", "HEAD"), "is_dirty": False}}
    assert git_states(files) == clean
    monkeypatch.chdir(world.plugins)
    assert git_states([]) == clean, "that of the working directory"
    copy_for_jobs(find_sources(world.config, ()), world.config.explorer.plugin_dirs, tmp_path / "copies")
    world.edit()
    assert git_states(files)[top]["is_dirty"]
    monkeypatch.setenv(SUBMITTED, str(tmp_path / "copies"))
    assert git_states(files) == json.loads(json.dumps(clean)), "a job has the states of its submission"
