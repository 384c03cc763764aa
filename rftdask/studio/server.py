"""Studio server: a Starlette application over a `Folder`, run by uvicorn.

Invariants:

- it listens on 127.0.0.1 only and rejects requests for other host names than those of its user's proxy, so that no web
  page can read a run by pointing its own host name at this machine (DNS rebinding);
- every user of this machine can reach 127.0.0.1, so every request needs the token of the printed URL; a cookie keeps
  it;
- GET and HEAD write and start nothing. Actions are POST requests to one address, with a JSON body, from a page of the
  same origin, with a second token that only the pages contain, because pages of other ports also send the cookie;
- a statement of the SQL page can access the tables of one run, but neither files nor settings.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Collection, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rftdask.driver.init_config import bundled, describe
from rftdask.errors import DataError, RftError, UserError
from rftdask.reports.lineage.browse import LEVELS, SORTS, Filter
from rftdask.reports.lineage.sql import OVERVIEW, query
from rftdask.reports.lineage.tables import TABLES
from rftdask.reports.page import contents
from rftdask.reports.page.answers import TASK_ORDERS, groups_of
from rftdask.reports.page.curves import arms_of, charts_of, curves_of, differing_contents, differing_settings
from rftdask.reports.page.rendering import NO_SCRIPTS, OWN_SCRIPTS, link, render
from rftdask.rollouts.policy.endpoint import read_body
from rftdask.run.run_folder import read_run
from rftdask.storage import open_storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import parse_object
from rftdask.studio.actions import Actions, fields_of
from rftdask.studio.folder import HERE, Folder
from rftdask.studio.form import FIRST, ROOT, Fields, form_keys

ADDRESS = "127.0.0.1"
MAX_COMPARED = 24
"""Runs per page of curves; more lines cannot be distinguished."""
_MAX_SQL_ROWS = 500
_SQL_DEADLINE_S = 60.0
_LOG_LINES = 200
_GROUPS = 20
_MAX_REQUEST_BYTES = 1_000_000
_UVICORN: dict[str, Any] = {"loop": "asyncio", "http": "h11"}
"""Fixed implementations, so that uvicorn does not choose by the installed packages."""


class _Guard:
    """Middleware that admits requests with the token and sets the headers of every response."""

    def __init__(self, app: ASGIApp, token: str, cookie: str, hosts: Set[str]) -> None:
        self._app, self._token, self._cookie, self._hosts = app, token, cookie, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # uvicorn refuses websockets

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                message["headers"] += [(n, v) for n, v in _HEADERS if n not in names]
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        request = HTTPConnection(scope)
        # Another host name means DNS rebinding by a foreign page.
        host = request.headers.get("host", "").lower()
        if host.rpartition(":")[0] not in (ADDRESS, "localhost") and re.sub(r":\d+\Z", "", host) not in self._hosts:
            text = f"this server answers requests for {' and '.join((ADDRESS, *sorted(self._hosts)))} only"
            return _message(403, "Wrong host", f"{text}; --allow-host names the host of a proxy")
        query = dict(request.query_params)
        if self._is_valid(query.pop("token", "")):
            # Redirect to a URL without the token, to keep it out of the history; scripts cannot read the cookie.
            # Relative, because a proxy may put the pages below a path; without any path it names no other host.
            moved = RedirectResponse(link("./" + request.url.path.rpartition("/")[2], query), status_code=303)
            moved.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return moved
        if not self._is_valid(request.cookies.get(self._cookie, "")):
            return _message(403, "Token missing", "open the complete URL that the command printed")
        return self._app

    def _is_valid(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


_HEADERS = (
    # Pages show text written by a policy, which may be malicious HTML.
    (b"content-security-policy", NO_SCRIPTS.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def _page(template: str, *, scripts: bool = False, **values: Any) -> HTMLResponse:
    headers = {"Content-Security-Policy": OWN_SCRIPTS} if scripts else None
    return HTMLResponse(render(template, package=__package__, scripts=scripts, **values), headers=headers)


def _message(status: int, title: str, text: str) -> HTMLResponse:
    page = render("parts/message.html.j2", package=__package__, title=title, text=text)
    return HTMLResponse(page, status_code=status)


class Studio:
    """Pages of a folder of runs; each public method handles the requests for one page."""

    def __init__(self, folder: Folder, *, read_only: bool = False) -> None:
        self.folder = folder
        # A folder that is itself a run is shown read-only.
        self.actions = None if read_only or folder.runs() == [HERE] else Actions(folder)
        self._action_token = secrets.token_urlsafe(24)
        """Proves that a request for an action comes from a page of this studio."""

    def app(self, token: str, cookie: str, hosts: Set[str] = frozenset()) -> Starlette:
        pages: list[Callable[[Request], Response]] = [
            *(self.run, self.compare, self.samples, self.task, self.groups, self.experiences, self.experience),
            *(self.distributions, self.sql, self.cluster, self.logs, self.about, self.reload, self.configure),
        ]
        static = StaticFiles(directory=Path(__file__).parent / "static", packages=[("rftdask.reports.page", "static")])
        return Starlette(
            routes=[
                Route("/", self.runs, methods=["GET"]),
                Route("/curves.json", self.curves, methods=["GET"]),
                *(Route(f"/{page.__name__}", page, methods=["GET"]) for page in pages),
                Route("/do", self.do, methods=["POST"]),
                Route("/favicon.ico", lambda _: Response(status_code=204)),  # browsers request one
                Mount("/static", static),
            ],
            middleware=[
                Middleware(_Guard, token=token, cookie=cookie, hosts=hosts),
                Middleware(GZipMiddleware, minimum_size=2000),
            ],
            exception_handlers={HTTPException: self._refuse, RftError: self._refuse},
        )

    def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status = error.status_code
            return _message(status, "Not found" if status == 404 else "Invalid request", str(error.detail))
        if isinstance(error, DataError | UserError):
            return _message(400, "Invalid request", str(error))
        return _message(500, "Read error", str(error))

    def _name(self, request: Request) -> str:
        """Return the requested run; by default the folder itself, if it is a run."""
        name = request.query_params.get("run", HERE)
        self.folder.url_of(name)  # raises if it does not exist
        return name

    def _run_page(self, name: str, page: str, template: str = "", scripts: bool = False, **values: Any) -> Response:
        """Render a page of a run with its header. template: its name without a suffix; "": that of the page."""
        head = {
            "run": name,
            "page": page,
            "title": self.folder.stages(name)[0].config.name.partition("/")[0] if name == HERE else name,
            "line": self.folder.line(name),
            "url": self.folder.url_of(name),
            "has_others": name != HERE,
        }
        return _page(f"{template or page}.html.j2", scripts=scripts, **head, **self._can(), **values)

    def _can(self) -> dict[str, Any]:
        """Values for a page with actions: the action token ("" without actions) and the started commands."""
        actions = self.actions
        return {"action_token": self._action_token if actions else "", "started": actions.started() if actions else []}

    def runs(self, request: Request) -> Response:
        if self.folder.runs() == [HERE]:
            return RedirectResponse(link("run"), status_code=303)
        return _page("runs.html.j2", scripts=True, lines=self.folder.lines(), url=self.folder.url, **self._can())

    def run(self, request: Request) -> Response:
        name, folder = self._name(request), self.folder
        values = contents.overview(folder.stages(name), folder.status(name), folder.summary(name))
        return self._run_page(name, "run", scripts=True, **values)

    def curves(self, request: Request) -> Response:
        names = self._several(request)
        # Before the stages, which are read again if the run has ended.
        lines = [self.folder.line(name) for name in names]
        stages = {name: self.folder.stages(name) for name in names}
        arms = arms_of(names, self._differing(names))
        runs = [
            {"run": line.name, "arm": arm, "state": line.state, "stages": curves_of(stages[line.name])}
            for line, arm in zip(lines, arms, strict=True)
        ]
        return JSONResponse(
            {"charts": charts_of([stage for of_run in stages.values() for stage in of_run]), "runs": runs}
        )

    def compare(self, request: Request) -> Response:
        names = self._several(request)
        differing = self._differing(names)
        return _page(
            "compare.html.j2",
            scripts=True,
            lines=[self.folder.line(name) for name in names],
            arms=arms_of(names, differing),
            differing=differing,
            url=self.folder.url,
        )

    def _differing(self, names: list[str]) -> dict[str, list[Any]]:
        settings = differing_settings([self.folder.config(name) for name in names])
        return settings | differing_contents([self.folder.fingerprints(name) for name in names])

    def _several(self, request: Request) -> list[str]:
        names = list(dict.fromkeys(request.query_params.getlist("run"))) or [HERE]
        if len(names) > MAX_COMPARED:
            raise DataError(f"cannot compare {len(names)} runs on one page; select at most {MAX_COMPARED}")
        for name in names:
            self.folder.url_of(name)  # raises if it does not exist
        return names

    def samples(self, request: Request) -> Response:
        name, query = self._name(request), request.query_params
        evals = self._shows_evals(name, query)
        if (order := query.get("order", "")) not in TASK_ORDERS:
            raise DataError(f"order must be one of {', '.join(filter(None, TASK_ORDERS))}, not {order!r:.100}")
        rows = self.folder.browser(name, evals=evals).rows
        values = contents.samples(rows, evals, query, max(1, _number(query, "page", 1)))
        return self._run_page(name, "samples", **values)

    def task(self, request: Request) -> Response:
        wanted = {key: request.query_params.get(key, "") for key in ("stage", "taskset", "task_index")}
        return self._groups(request, "task", wanted)

    def groups(self, request: Request) -> Response:
        return self._groups(request, "groups", {})

    def _groups(self, request: Request, page: str, wanted: dict[str, str]) -> Response:
        name, query = self._name(request), request.query_params
        evals = self._shows_evals(name, query)
        rows = self.folder.browser(name, evals=evals).rows
        for key, value in wanted.items():
            rows = rows[rows[key].astype(str) == value]
        steps = sorted(map(int, rows["explore_step"].unique()))
        step = _number(query, "step", steps[-1] if steps else 0)
        if not wanted:
            rows = rows[rows["explore_step"] == step]
        number = max(1, _number(query, "page", 1))
        groups, count = groups_of(rows, (number - 1) * _GROUPS, _GROUPS)
        if wanted and not groups:
            raise HTTPException(404, "the run has no answers to this task")
        which = wanted or {"step": str(step)}
        return self._run_page(
            name,
            "samples",
            "groups",
            evals=evals,
            query={"run": name, "evals": "yes" if evals else "no", **which},
            where=page,
            steps=steps,
            step=step,
            groups=groups,
            count=count,
            number=number,
            num_pages=-(-count // _GROUPS),
        )

    def _shows_evals(self, name: str, query: QueryParams) -> bool:
        """Return True if a page shows evaluations. By default it does if the run has any: their tasks stay the same."""
        if "evals" in query:
            return query["evals"] == "yes"
        return bool(len(self.folder.browser(name, evals=True).rows))

    def experiences(self, request: Request) -> Response:
        name, query = self._name(request), request.query_params
        browser, wanted = self.folder.browser(name), Filter.from_query(query)
        menus = {key: browser.choices(key) for key in ("stage", "status")}
        menus["state"] = browser.choices("state", "reason")
        rows = browser.page(wanted, _number(query, "page", 1))
        values: dict[str, Any] = {"browser": browser, "wanted": wanted, "found": rows, "menus": menus, "sorts": SORTS}
        return self._run_page(name, "experiences", **values)

    def experience(self, request: Request) -> Response:
        name, query = self._name(request), request.query_params
        evals = query.get("evals", "") == "yes"
        browser, rows = self.folder.browser(name, evals=evals), numbers_in([query.get("row", "")])
        shown = browser.show(query.get("stage", ""), query.get("shard", ""), rows[0]) if rows else None
        if shown is None:
            raise HTTPException(404, "the run has no such experience")
        return self._run_page(name, "experiences", "experience", shown=shown, levels=LEVELS, evals=evals)

    def distributions(self, request: Request) -> Response:
        name = self._name(request)
        return self._run_page(name, "distributions", **contents.distributions(self.folder.browser(name).rows))

    def sql(self, request: Request) -> Response:
        name = self._name(request)
        text = request.query_params.get("q", "").strip() or OVERVIEW.strip()
        table, problem = None, ""
        # The user did not request what a link of a foreign page contains.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            problem = "this statement comes from a link of another site and was not run; check it, then run it"
        else:
            try:
                tables = self.folder.browser(name).tables
                table = query(tables, text, confined=True, deadline_s=_SQL_DEADLINE_S, max_rows=_MAX_SQL_ROWS + 1)
            except UserError as error:
                problem = str(error)
        return self._run_page(
            name,
            "sql",
            text=text,
            columns=[] if table is None else table.column_names,
            rows=[] if table is None else [list(r.values()) for r in table.slice(0, _MAX_SQL_ROWS).to_pylist()],
            has_more=table is not None and table.num_rows > _MAX_SQL_ROWS,
            problem=problem,
            tables=TABLES,
        )

    def cluster(self, request: Request) -> Response:
        name, folder = self._name(request), self.folder
        values = contents.cluster(folder.stages(name), folder.status(name), folder.jobs(name))
        return self._run_page(name, "cluster", scripts=True, **values)

    def about(self, request: Request) -> Response:
        name = self._name(request)
        return self._run_page(name, "about", **contents.about(self.folder.stages(name), self.folder.summary(name)))

    def logs(self, request: Request) -> Response:
        name, role = self._name(request), request.query_params.get("role", "")
        logs = self.folder.logs(name, _LOG_LINES)
        names = {log: log.rpartition("/")[2] for log in logs}
        roles = sorted({re.split("[-.]", log)[0] for log in names.values()})
        logs = {log: lines for log, lines in logs.items() if names[log].startswith(role)}
        return self._run_page(name, "logs", scripts=True, logs=logs, roles=roles, role=role)

    def reload(self, request: Request) -> Response:
        """Empty the cache, then show the experiences."""
        name = self._name(request)
        self.folder.clear()
        return RedirectResponse(link("experiences", run=name), status_code=303)

    def configure(self, request: Request) -> Response:
        """A configuration as a form. Query: `config` (saved), `run` (of this run) or `like` (bundled)."""
        if self.actions is None:
            raise HTTPException(404, "this studio is read-only; open a folder of runs without --read-only")
        query, fields, name = request.query_params, Fields(), "first"
        files = {key: path for key, path in bundled().items() if key.startswith("config/")}
        if "config" in query:
            name, fields = query["config"], self.actions.read(query["config"])
        elif "run" in query:
            config = self.folder.config(self._name(request))
            fields, name = Fields.of_run(config), f"{config.name}-2"
            fields = Fields({**fields.texts, "name": name}, fields.rest)
        elif query.get("like") in files:
            fields = Fields.of_file(files[query["like"]].read_text())
            name = fields.texts.get("name", "first")
        keys = form_keys()
        sections: dict[str, list[Any]] = {"Common keys": [keys[path] for path in FIRST]}
        for path, key in keys.items():
            if path not in FIRST and path != ROOT:
                sections.setdefault(key.section or "run", []).append(key)
        return _page(
            "configure.html.j2",
            scripts=True,
            url=self.folder.url,
            name=name,
            fields=fields,
            sections=sections,
            configs=self.actions.configs(),
            files={key: describe(path) for key, path in files.items()},
            like=query.get("like", ""),
            **self._can(),
        )

    async def do(self, request: Request) -> Response:
        """Run one action and respond with JSON. "do" in the body: "form", "save", or an action of `Actions.start`."""
        headers, actions = request.headers, self.actions
        action_token = headers.get("x-rftdask-action-token", "")
        if (
            actions is None
            or headers.get("origin") not in (f"http://{headers.get('host')}", f"https://{headers.get('host')}")
            or headers.get("sec-fetch-site", "same-origin") != "same-origin"
            or not secrets.compare_digest(action_token.encode(), self._action_token.encode())
        ):
            return JSONResponse({"error": "only a page of this studio can request actions; reload the page"}, 403)
        is_json = headers.get("content-type") == "application/json"
        data = await read_body(request, _MAX_REQUEST_BYTES) if is_json else None
        if data is None:
            return JSONResponse({"error": f"the request must be JSON of at most {_MAX_REQUEST_BYTES:,} bytes"}, 400)
        try:
            return JSONResponse(await run_in_threadpool(self._do, actions, parse_object(data)))
        except (RftError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)

    def _do(self, actions: Actions, body: dict[str, Any]) -> dict[str, Any]:
        action, target = str(body.get("do", "")), str(body.get("of", ""))
        if action == "form":
            checked = actions.check(fields_of(body), str(body.get("gpu", "")))
            return {name: getattr(checked, name) for name in ("yaml", "problems", "warnings", "plan", "memory")}
        if "fields" in body:
            path = actions.save(target, fields_of(body), replace=body.get("replace") is True)
            if action == "save":
                return {"message": f"wrote {path}"}
        return {"message": f"started: {actions.start(action, target).command}"}


def _number(query: QueryParams, key: str, default: int) -> int:
    numbers = numbers_in([query[key]]) if key in query else [default]
    if not numbers or numbers[0] < 0:
        raise DataError(f"{key} must be a number, not {query[key]!r:.100}")
    return numbers[0]


class StudioServer(AbstractContextManager["StudioServer"]):
    """Studio on its own port. Example: with StudioServer("runs") as server: print(server.address()); server.run()"""

    def __init__(self, url: str | Path, port: int = 0, *, read_only: bool = False, hosts: Collection[str] = ()) -> None:
        """Args: port: 0 selects a free port. read_only: True disables actions. hosts: host names of proxies.

        Raises: UserError: the port is in use; StorageError: no storage supports the URL.
        """
        import uvicorn  # late: only a server needs it

        self.folder = Folder(url)
        self.token = secrets.token_urlsafe(24)
        try:
            self._socket = socket.create_server((ADDRESS, port))  # requests before `run` wait
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(
                f"cannot listen on port {port} of {ADDRESS}: {why}; --port 0 selects a free port"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.cookie = f"rftdask-{self.port}"
        """Name of the cookie that keeps the token. It contains the port, because all ports share cookies."""
        app = Studio(self.folder, read_only=read_only).app(self.token, self.cookie, {host.lower() for host in hosts})
        # The terminal belongs to the user, so requests are not logged.
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, **_UVICORN
        )
        self._server = uvicorn.Server(config)

    def address(self, path: str = "/", **query: str) -> str:
        """Return the URL of a page, including the token."""
        return f"http://{ADDRESS}:{self.port}{link(path, query, token=self.token)}"

    def run(self) -> None:
        """Serve until `stop` is called or the main thread receives a signal."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`. Can be called from any thread."""
        self._server.should_exit = True

    def __exit__(self, *exc: object) -> None:
        self._socket.close()


def serve(
    url: str | Path,
    port: int,
    *,
    page: str = "/",
    open_browser: bool,
    say: Callable[[str], object],
    read_only: bool = False,
    hosts: Collection[str] = (),
) -> None:
    """Serve until Ctrl-C.

    Args: page: first page to open. If it is not the list of runs ("/"), `url` must be a run. hosts: see StudioServer.
    Raises: UserError: the port is in use; DataError: `url` is not a run, or is empty although `read_only` is True.
    """
    storage = open_storage(url)
    if page != "/":
        read_run(storage)
    is_empty = page == "/" and not storage.list()
    if is_empty and read_only:
        raise DataError(f"no runs found in {storage.url}; pass the folder that contains your runs")
    with StudioServer(url, port, read_only=read_only, hosts=hosts) as server:
        address = server.address(page)
        say(f"{address}  (press Ctrl-C to stop)")
        if is_empty:
            say(f"{storage.url} is empty or does not exist yet; runs started from the studio will be stored in it")
        if open_browser:
            webbrowser.open(address)
        try:
            server.run()
        except KeyboardInterrupt:
            say("ended")
