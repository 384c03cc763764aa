"""Actions: write configurations below the studio's folder, and start, submit, stop and continue runs with the commands
that a user would type.

Invariants: files are written to `configs` of the folder only, and only configurations that `load_config` accepts; a
started run is below the folder; a started command outlives the studio. The server decides which requests may act.
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
from functools import cached_property
from pathlib import Path
from typing import Any

from rftdask.cluster.jobs import read_jobs
from rftdask.errors import DataError, NotFoundError, UserError
from rftdask.storage import open_storage
from rftdask.studio.folder import Folder
from rftdask.studio.form import Checked, Fields, check_form

CONFIGS = "configs"
_NAME = re.compile(r"[\w][\w.-]{0,80}")
_MAX_STARTED = 30
_TAIL_BYTES = 20_000
_COMMANDS = {
    "start": "run {} --progress plain",
    "submit": "submit {}",
    "dry-run": "submit --dry-run {}",
    "check": "validate --data {}",
}
"""Command of each action on a configuration file."""


@dataclass(frozen=True)
class Started:
    action: str
    """start, submit, dry-run, check, stop or continue."""
    target: str
    command: str
    at_s: float
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def state(self) -> str:
        code = self.process.poll()
        return "running" if code is None else "finished" if code == 0 else "failed"

    @property
    def tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")


class Actions:
    """Example: actions.save("first", Fields.of_file(text)); actions.start("start", "first")"""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._storage = folder, open_storage(folder.url)
        self._lock, self._started = threading.Lock(), list[Started]()

    def configs(self) -> list[str]:
        with contextlib.suppress(NotFoundError):
            return sorted(n.removesuffix(".yaml") for n in self._storage.list(CONFIGS) if n.endswith(".yaml"))
        return []

    def read(self, name: str) -> Fields:
        """Read a configuration. Raises: DataError: it does not exist; UserError: it is not valid YAML."""
        return Fields.of_file(self._get(name).decode())

    def check(self, fields: Fields, gpu: str = "") -> Checked:
        return check_form(fields, self._folder.url, gpu)

    def save(self, name: str, fields: Fields, *, replace: bool = False) -> str:
        """Write a configuration and return its path below the folder. Raises: UserError: the configuration is invalid,
        or another one has the name and `replace` is False.
        """
        checked = self.check(fields)
        if checked.problems:
            raise UserError("not saved: " + "; ".join(f"{k}: {v}" for k, v in checked.problems.items()))
        data = checked.yaml.encode()
        if replace:
            self._storage.put(_path(name), data)
        elif not self._storage.put_new(_path(name), data) and self._storage.get(_path(name)) != data:
            raise UserError(f"{_path(name)} already exists with other contents; use another name, or replace it")
        return _path(name)

    def start(self, action: str, target: str) -> Started:
        """Start an action's command; see `Started`. Raises: DataError: no such target; UserError: it is invalid."""
        with self._lock:
            if any((s.action, s.target, s.state) == (action, target, "running") for s in self._started):
                raise UserError(f"{action} of {target} is already running")
            command = self._command(action, target)
            number = len(list(self._log_folder.iterdir()))
            log = self._log_folder / f"{number:04d}-{action}.log"
            with log.open("wb") as out:
                # In a new session, so that neither the end of the studio nor Ctrl-C in its terminal ends the run.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            shown = " ".join(["rftdask", *command[3:]])
            started = Started(action, target, shown, time.time(), process, log)
            self._started.append(started)
            # Forget the oldest ended commands only; running ones must be kept until their exit status is read.
            ended = [command for command in self._started if command.state != "running"]
            for command_ended in ended[: max(0, len(self._started) - _MAX_STARTED)]:
                self._started.remove(command_ended)
            return started

    def started(self) -> list[Started]:
        with self._lock:
            return self._started[::-1]

    def _command(self, action: str, target: str) -> list[str]:
        base = [sys.executable, "-m", "rftdask"]
        if action in _COMMANDS:
            file = self._file(target)
            return [*base, *(part.format(file) for part in _COMMANDS[action].split())]
        if action == "stop":
            return [*base, "cancel", self._folder.url_of(target)]
        if action != "continue":
            raise UserError(f"unknown action {action!r:.50}; use {', '.join(_COMMANDS)}, stop or continue")
        url, config = self._folder.url_of(target), self._folder.config(target)
        if open_storage(config.checkpoint_job_dir).url != open_storage(url).url:
            raise UserError(
                f"{target} was created in {config.checkpoint_job_dir} and can only be continued in that folder"
            )
        path = self._log_folder / (re.sub(r"[^\w.-]", "-", target) + ".yaml")
        path.write_text(config.to_yaml())
        submitted = bool(read_jobs(open_storage(url))) or not config.cluster.is_one_machine
        return [*base, *(part.format(path) for part in _COMMANDS["submit" if submitted else "start"].split())]

    def _get(self, name: str) -> bytes:
        try:
            return self._storage.get(_path(name))
        except NotFoundError:
            raise DataError(f"{self._folder.url} has no {_path(name)}") from None

    def _file(self, name: str) -> str:
        """Return the local path of a configuration for a command."""
        data, local = self._get(name), Path(self._folder.url) / _path(name)
        if "://" in self._folder.url:
            local = self._log_folder / f"{name}.yaml"
            local.write_bytes(data)
        return str(local)

    @cached_property
    def _log_folder(self) -> Path:
        # mkdtemp creates it with mode 0700. It is not deleted, because started runs still write to it.
        return Path(tempfile.mkdtemp(prefix="rftdask-studio-"))


def fields_of(request: Mapping[str, Any]) -> Fields:
    """Parse the form sent by a page. Raises: UserError: not a form."""
    texts, rest = request.get("fields"), request.get("rest", "")
    if not isinstance(texts, dict) or not isinstance(rest, str) or not all(isinstance(v, str) for v in texts.values()):
        raise UserError("a form has `fields` (texts by key) and `rest` (a text)")
    return Fields({str(key): value for key, value in texts.items()}, rest)


def _path(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"invalid configuration name {name!r:.100}: use letters, digits, '.', '_' and '-' only")
    return f"{CONFIGS}/{name}.yaml"
