"""Actions: what the studio does beside showing: it writes configurations below its folder, and starts, submits, stops
and continues runs, by the very commands that somebody would type.

Invariants: a file is written to `configs` of the folder and nowhere else, and only a configuration that `load_config`
takes; a run that is started is below the folder; a command that was started outlives the studio. Who may ask for any of
it is the server's business.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftdask.cluster.jobs import read_jobs
from rftdask.errors import DataError, NotFoundError, UserError
from rftdask.storage import open_storage
from rftdask.studio.folder import HERE, Folder
from rftdask.studio.form import Checked, Fields, check_form

CONFIGS = "configs"
"""Where configurations are, below the folder."""
_NAME = re.compile(r"[\w][\w.-]{0,80}")
_MOST_STARTED = 30
_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class Started:
    """A command that was started here."""

    what: str
    """start, submit, dry-run, check, stop or continue."""
    of: str
    """The configuration or the run."""
    command: str
    at_s: float
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def state(self) -> str:
        """running, finished or failed."""
        code = self.process.poll()
        return "running" if code is None else "finished" if code == 0 else "failed"

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")


class Actions:
    """Example: actions.save("first", Fields.of_file(text)); actions.start("start", "first")"""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._storage = folder, open_storage(folder.url)
        self._lock, self._made = threading.Lock(), list[Started]()
        self._logs: Path | None = None

    def configs(self) -> list[str]:
        """Names of the configurations below the folder, sorted."""
        with contextlib.suppress(NotFoundError):
            return sorted(n.removesuffix(".yaml") for n in self._storage.list(CONFIGS) if n.endswith(".yaml"))
        return []

    def read(self, name: str) -> Fields:
        """Raises: DataError: there is none of that name; UserError: it is no YAML."""
        try:
            return Fields.of_file(self._storage.get(_path(name)).decode())
        except NotFoundError:
            raise DataError(f"{self._folder.url} has no {_path(name)}") from None

    def check(self, fields: Fields, gpu: str = "") -> Checked:
        """What a form comes to; see `check_form`."""
        return check_form(fields, self._folder.url, gpu)

    def save(self, name: str, fields: Fields, *, replace: bool = False) -> str:
        """Write a configuration; its path below the folder. Raises: UserError: it is wrong, or there and not to be
        replaced.
        """
        checked = self.check(fields)
        if checked.problems:
            raise UserError("nothing is written: " + "; ".join(f"{k}: {v}" for k, v in checked.problems.items()))
        data = checked.yaml.encode()
        if replace:
            self._storage.put(_path(name), data)
        elif not self._storage.put_new(_path(name), data) and self._storage.get(_path(name)) != data:
            raise UserError(f"{_path(name)} is there already, and is another one; name it otherwise, or replace it")
        return _path(name)

    def start(self, what: str, of: str) -> Started:
        """Begin a command: `start`, `submit`, `dry-run`, `check` of a configuration, `stop`, `continue` of a run.

        Raises: DataError: there is no such configuration or run; UserError: no such command, or it is under way.
        """
        with self._lock:
            if any((each.what, each.of, each.state) == (what, of, "running") for each in self._made):
                raise UserError(f"{what} of {of} is under way already")
            command = self._command(what, of)
            number = len(list(self._log_folder.iterdir()))
            log = self._log_folder / f"{number:04d}-{what}.log"
            with log.open("wb") as out:
                # A session of its own: the run goes on when the studio ends, and Ctrl-C there is not for it.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            shown = " ".join(["rftdask", *command[3:]])
            made = Started(what, of, shown, time.time(), process, log)
            self._made.append(made)
            # Those that have ended, the oldest first; one that runs is kept, so that somebody takes its end.
            ended = [each for each in self._made if each.state != "running"]
            for each in ended[: max(0, len(self._made) - _MOST_STARTED)]:
                self._made.remove(each)
            return made

    def started(self) -> list[Started]:
        """What was started here, the newest first."""
        with self._lock:
            return self._made[::-1]

    def _command(self, what: str, of: str) -> list[str]:
        base = [sys.executable, "-m", "rftdask"]
        match what:
            case "start":
                return [*base, "run", self._file(of), "--progress", "plain"]
            case "submit":
                return [*base, "submit", self._file(of)]
            case "dry-run":
                return [*base, "submit", "--dry-run", self._file(of)]
            case "check":
                return [*base, "validate", "--data", self._file(of)]
            case "stop":
                return [*base, "cancel", self._folder.url_of(of)]
            case "continue":
                url, config = self._folder.url_of(of), self._folder.config(of)
                if open_storage(config.checkpoint_job_dir).url != open_storage(url).url:
                    raise UserError(f"{of} was made in {config.checkpoint_job_dir}, and can only be continued there")
                path = self._log_folder / (re.sub(r"[^\w.-]", "-", of) + ".yaml")
                path.write_text(config.to_yaml())
                submitted = bool(read_jobs(open_storage(url))) or not config.cluster.is_one_machine
                return [*base, "submit", str(path)] if submitted else [*base, "run", str(path), "--progress", "plain"]
        raise UserError(f"there is nothing to do that is called {what!r:.50}")

    def _file(self, name: str) -> str:
        """A configuration as a file that a command reads."""
        try:
            data = self._storage.get(_path(name))
        except NotFoundError:
            raise DataError(f"{self._folder.url} has no {_path(name)}") from None
        local = Path(self._folder.url) / _path(name)
        if "://" in self._folder.url:
            local = self._log_folder / f"{name}.yaml"
            local.write_bytes(data)
        return str(local)

    @property
    def _log_folder(self) -> Path:
        # mkdtemp's folders are their owner's alone. It stays: a run that was started here still writes to it.
        self._logs = self._logs or Path(tempfile.mkdtemp(prefix="rftdask-studio-"))
        return self._logs


def fields_of(asked: Mapping[str, Any]) -> Fields:
    """The form as a page sends it. Raises: UserError: it is none."""
    texts, rest = asked.get("fields"), asked.get("rest", "")
    if not isinstance(texts, dict) or not isinstance(rest, str) or not all(isinstance(v, str) for v in texts.values()):
        raise UserError("a form has `fields`, texts by key, and `rest`, a text")
    return Fields({str(key): value for key, value in texts.items()}, rest)


def can_act(folder: Folder) -> bool:
    """Whether there is a folder to write to: one run alone is shown, and nothing else."""
    return folder.runs() != [HERE]


def _path(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r:.100} is no name of a configuration: letters, digits, '.', '_' and '-', no folders")
    return f"{CONFIGS}/{name}.yaml"
