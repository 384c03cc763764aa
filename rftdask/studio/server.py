"""The studio's server: a Starlette application over a `Folder`, run by uvicorn.

Invariants:

- it listens on 127.0.0.1 only, and answers no request that was made for another host name, so that a page elsewhere
  cannot read a run by pointing its own name at this machine;
- every user of this machine reaches 127.0.0.1, so everything asks for the token of the printed URL; a cookie keeps it;
- GET and HEAD write and start nothing. What does is one address, asked by POST as JSON by a page of this very origin
  that has the second token, which stands in the pages alone: a cookie is also sent by pages of other ports;
- a query of the SQL page reaches the tables of one run, and neither files nor settings.
"""

from __future__ import annotations

import re
import secrets
import socket
import webbrowser
from collections.abc import Callable
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
from rftdask.run.run_folder import read_run
from rftdask.storage import open_storage
from rftdask.storage.base import numbers_in
from rftdask.storage.checked_json import parse_object
from rftdask.studio import contents
from rftdask.studio.actions import Actions, can_act, fields_of
from rftdask.studio.answers import TASK_ORDERS, groups_of
from rftdask.studio.curves import arms_of, charts_of, curves_of, differing_contents, differing_settings
from rftdask.studio.folder import HERE, Folder
from rftdask.studio.form import FIRST, ROOT, Fields, form_keys
from rftdask.studio.pages import NO_SCRIPTS, OWN_SCRIPTS, link, render

ADDRESS = "127.0.0.1"
MOST_COMPARED = 24
"""Runs on one page: more lines than eyes tell apart."""
_MOST_SQL_ROWS = 500
_SQL_DEADLINE_S = 60.0
_LOG_LINES = 200
_GROUPS = 20
_MOST_ASKED_BYTES = 1_000_000
_SAME: dict[str, Any] = {"loop": "asyncio", "http": "h11"}
"""Of uvicorn: the same, whatever other packages are installed that it would take."""


class _Guard:
    """Lets through who has the token, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing here speaks websocket, and uvicorn then refuses it

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] += [(n, v) for n, v in _HEADERS if n not in given]
            await send(message)

        await self._answer(scope)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> ASGIApp:
        request = HTTPConnection(scope)
        # A name of another host that points here is a page elsewhere that wants to read the run.
        if request.headers.get("host", "").rpartition(":")[0] not in (ADDRESS, "localhost"):
            return _message(403, "Not here", f"this server answers for {ADDRESS} alone")
        given = dict(request.query_params)
        if self._opens(given.pop("token", "")):
            # To a URL without it, for it would stand in the history; it moves to a cookie that scripts cannot read.
            moved = RedirectResponse(link("/" + request.url.path.lstrip("/"), given), status_code=303)
            moved.set_cookie(self._cookie, self._token, httponly=True, samesite="lax")
            return moved
        if not self._opens(request.cookies.get(self._cookie, "")):
            return _message(403, "Not yours", "open the whole URL that the command printed")
        return self._app

    def _opens(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())


_HEADERS = (
    # Pages show text that a policy wrote, which may be HTML that would like to run.
    (b"content-security-policy", NO_SCRIPTS.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def _page(template: str, *, scripts: bool = False, **values: Any) -> HTMLResponse:
    headers = {"Content-Security-Policy": OWN_SCRIPTS} if scripts else None
    return HTMLResponse(render(template, scripts=scripts, **values), headers=headers)


def _message(status: int, title: str, text: str) -> HTMLResponse:
    return HTMLResponse(render("parts/message.html.j2", title=title, text=text), status_code=status)


class Studio:
    """The pages of a folder of runs: each method is one, from a query to an answer."""

    def __init__(self, folder: Folder, *, read_only: bool = False) -> None:
        self.folder = folder
        self.actions = None if read_only or not can_act(folder) else Actions(folder)
        self._asking = secrets.token_urlsafe(24)
        """Who asks for an action shows that he reads the pages."""

    def app(self, token: str, cookie: str) -> Starlette:
        """The application that a server runs."""
        pages = {
            "/": self.runs,
            "/run": self.run,
            "/curves.json": self.curves,
            "/compare": self.compare,
            "/samples": self.samples,
            "/task": self.task,
            "/groups": self.groups,
            "/experiences": self.experiences,
            "/experience": self.experience,
            "/distributions": self.distributions,
            "/sql": self.sql,
            "/cluster": self.cluster,
            "/logs": self.logs,
            "/about": self.about,
            "/reload": self.reload,
            "/configure": self.configure,
        }
        static = StaticFiles(directory=Path(__file__).parent / "static")
        return Starlette(
            routes=[
                *(Route(path, page, methods=["GET"]) for path, page in pages.items()),
                Route("/do", self.do, methods=["POST"]),
                Route("/favicon.ico", lambda _: Response(status_code=204)),  # browsers ask for one
                Mount("/static", static),
            ],
            middleware=[Middleware(_Guard, token=token, cookie=cookie), Middleware(GZipMiddleware, minimum_size=2000)],
            exception_handlers={HTTPException: self._refuse, RftError: self._refuse},
        )

    def _refuse(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            status = error.status_code
            return _message(status, "Not found" if status == 404 else "Not understood", str(error.detail))
        title = "Not understood" if isinstance(error, DataError | UserError) else "Not read"
        return _message(400 if title == "Not understood" else 500, title, str(error))

    def _name(self, request: Request) -> str:
        """The run that is asked for; of a folder that is one, that one."""
        name = request.query_params.get("run", HERE)
        self.folder.url_of(name)  # raises where there is none
        return name

    def _head(self, name: str) -> dict[str, Any]:
        """What every page of a run says above: which run, and how it stands."""
        line = self.folder.line(name)
        title = self.folder.stages(name)[0].config.name.partition("/")[0] if name == HERE else name
        return {
            "run": name,
            "title": title,
            "line": line,
            "url": self.folder.url_of(name),
            "has_others": name != HERE,
            **self._can(),
        }

    def _can(self) -> dict[str, Any]:
        """What a page needs to offer actions: the token to ask for them, "" where there are none; what was started."""
        actions = self.actions
        return {"asking": self._asking if actions else "", "started": actions.started() if actions else []}

    # ---- runs

    def runs(self, request: Request) -> Response:
        """All runs, to be filtered, opened and compared."""
        if self.folder.runs() == [HERE]:
            return RedirectResponse(link("run"), status_code=303)
        return _page("runs.html.j2", scripts=True, lines=self.folder.lines(), url=self.folder.url, **self._can())

    def run(self, request: Request) -> Response:
        """One run: what happened, why it does not learn, where it stands, its curves."""
        name = self._name(request)
        told = contents.overview(self.folder, name, self.folder.summary(name))
        return _page("run.html.j2", scripts=True, **self._head(name), page="run", **told)

    def curves(self, request: Request) -> Response:
        """The numbers of the runs that a page draws."""
        names = self._several(request)
        lines = [self.folder.line(name) for name in names]  # first: of one that has ended the stages are read again
        stages = {name: self.folder.stages(name) for name in names}
        differing = self._differing(names)
        arms = arms_of(names, differing)
        runs = [
            {"run": line.name, "arm": arm, "state": line.state, "stages": curves_of(stages[line.name])}
            for line, arm in zip(lines, arms, strict=True)
        ]
        return JSONResponse({"charts": charts_of([s for own in stages.values() for s in own]), "runs": runs})

    def compare(self, request: Request) -> Response:
        """Several runs: in what they differ, then their curves over each other."""
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
        return settings | differing_contents([self.folder.made_of(name) for name in names])

    def _several(self, request: Request) -> list[str]:
        names = list(dict.fromkeys(request.query_params.getlist("run"))) or [HERE]
        if len(names) > MOST_COMPARED:
            raise DataError(f"at most {MOST_COMPARED} runs can be compared on one page, not {len(names)}")
        for name in names:
            self.folder.url_of(name)  # raises where there is none
        return names

    # ---- what it said

    def samples(self, request: Request) -> Response:
        """Tasks by steps: which were learned, and which were not."""
        name, asked = self._name(request), request.query_params
        evals = self._of_evals(name, asked)
        if (order := asked.get("order", "")) not in TASK_ORDERS:
            raise DataError(f"order must be one of {', '.join(filter(None, TASK_ORDERS))}, not {order!r:.100}")
        rows = self.folder.browser(name, evals=evals).rows
        told = contents.samples(rows, evals, dict(asked), max(1, _number(asked, "page", 1)))
        return _page("samples.html.j2", **self._head(name), page="samples", **told)

    def task(self, request: Request) -> Response:
        """One task: its answers from the first policy to the last."""
        asked = request.query_params
        wanted = {key: asked.get(key, "") for key in ("stage", "taskset", "task_index")}
        return self._groups(request, "task", wanted)

    def groups(self, request: Request) -> Response:
        """The groups of a step, side by side with their rewards."""
        return self._groups(request, "groups", {})

    def _groups(self, request: Request, page: str, wanted: dict[str, str]) -> Response:
        name, asked = self._name(request), request.query_params
        evals = self._of_evals(name, asked)
        rows = self.folder.browser(name, evals=evals).rows
        for key, value in wanted.items():
            rows = rows[rows[key].astype(str) == value]
        steps = sorted(map(int, rows["explore_step"].unique()))
        step = _number(asked, "step", steps[-1] if steps else 0)
        if not wanted:
            rows = rows[rows["explore_step"] == step]
        number = max(1, _number(asked, "page", 1))
        found, count = groups_of(rows, (number - 1) * _GROUPS, _GROUPS)
        if wanted and not found:
            raise HTTPException(404, "the run has no answers to such a task")
        which = wanted or {"step": str(step)}
        return _page(
            "groups.html.j2",
            **self._head(name),
            page="samples",
            evals=evals,
            query={"run": name, "evals": "yes" if evals else "no", **which},
            where=page,
            steps=steps,
            step=step,
            groups=found,
            count=count,
            number=number,
            num_pages=-(-count // _GROUPS),
        )

    def _of_evals(self, name: str, asked: QueryParams) -> bool:
        """Answers to evaluations, the same tasks each time, where there are some and nothing else is asked for."""
        if "evals" in asked:
            return asked["evals"] == "yes"
        return bool(len(self.folder.browser(name, evals=True).rows))

    def experiences(self, request: Request) -> Response:
        """The experiences as a list."""
        name, asked = self._name(request), request.query_params
        browser, wanted = self.folder.browser(name), Filter.from_query(asked)
        menus = {key: browser.choices(key) for key in ("stage", "status")}
        menus["state"] = browser.choices("state", "reason")
        found = browser.page(wanted, _number(asked, "page", 1))
        shown: dict[str, Any] = {"browser": browser, "wanted": wanted, "found": found, "menus": menus, "sorts": SORTS}
        return _page("experiences.html.j2", **self._head(name), page="experiences", **shown)

    def experience(self, request: Request) -> Response:
        """One experience to the token."""
        name, asked = self._name(request), request.query_params
        evals = asked.get("evals", "") == "yes"
        browser, rows = self.folder.browser(name, evals=evals), numbers_in([asked.get("row", "")])
        shown = browser.show(asked.get("stage", ""), asked.get("shard", ""), rows[0]) if rows else None
        if shown is None:
            raise HTTPException(404, "the run has no such experience")
        told: dict[str, Any] = {"browser": browser, "shown": shown, "levels": LEVELS, "evals": evals}
        return _page("experience.html.j2", **self._head(name), page="experiences", **told)

    def distributions(self, request: Request) -> Response:
        """Rewards and lengths of the rollouts by explore step."""
        name = self._name(request)
        told = contents.distributions(self.folder.browser(name).rows)
        return _page("distributions.html.j2", **self._head(name), page="distributions", **told)

    def sql(self, request: Request) -> Response:
        """The tables of a run, asked in SQL."""
        name = self._name(request)
        text = request.query_params.get("q", "").strip() or OVERVIEW.strip()
        table, problem = None, ""
        # Browsers say where a request comes from; a link of a page elsewhere is not what the user asked.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            problem = "this statement came by a link from elsewhere, and was not run: look at it, then ask"
        else:
            try:
                tables = self.folder.browser(name).tables
                table = query(tables, text, confined=True, deadline_s=_SQL_DEADLINE_S, max_rows=_MOST_SQL_ROWS + 1)
            except UserError as error:
                problem = str(error)
        return _page(
            "sql.html.j2",
            **self._head(name),
            page="sql",
            text=text,
            columns=[] if table is None else table.column_names,
            rows=[] if table is None else [list(r.values()) for r in table.slice(0, _MOST_SQL_ROWS).to_pylist()],
            has_more=table is not None and table.num_rows > _MOST_SQL_ROWS,
            problem=problem,
            tables=TABLES,
        )

    # ---- how it runs

    def cluster(self, request: Request) -> Response:
        """Who works on it and with what, its jobs and their queue, what it took."""
        name = self._name(request)
        told = contents.cluster(self.folder, name)
        return _page("cluster.html.j2", scripts=True, **self._head(name), page="cluster", **told)

    def about(self, request: Request) -> Response:
        """What its numbers mean, and what it was made of."""
        name = self._name(request)
        told = contents.about(self.folder, name, self.folder.summary(name))
        return _page("about.html.j2", **self._head(name), page="about", **told)

    def logs(self, request: Request) -> Response:
        """What its processes logged last."""
        name, role = self._name(request), request.query_params.get("role", "")
        logs = self.folder.logs(name, _LOG_LINES)
        names = {log: log.rpartition("/")[2] for log in logs}
        told = {
            "logs": {log: lines for log, lines in logs.items() if names[log].startswith(role)},
            "roles": sorted({re.split("[-.]", name)[0] for name in names.values()}),
            "role": role,
        }
        return _page("logs.html.j2", scripts=True, **self._head(name), page="logs", **told)

    def reload(self, request: Request) -> Response:
        """Read everything again, then the page that is asked for."""
        name = self._name(request)
        self.folder.forget()
        return RedirectResponse(link("experiences", run=name), status_code=303)

    # ---- what it does

    def configure(self, request: Request) -> Response:
        """A configuration as a form. Query: `config`, of the folder; `run`, what that said; `like`, a bundled one."""
        if self.actions is None:
            raise HTTPException(404, "this studio only shows: open a folder of runs, without --read-only")
        asked, fields, name = request.query_params, Fields(), "first"
        files = {key: path for key, path in bundled().items() if key.startswith("config/")}
        if "config" in asked:
            name, fields = asked["config"], self.actions.read(asked["config"])
        elif "run" in asked:
            config = self.folder.config(self._name(request))
            fields = Fields.of_run(config)
            name = f"{config.name}-2"
            fields = Fields({**fields.texts, "name": name}, fields.rest)
        elif asked.get("like") in files:
            fields = Fields.of_file(files[asked["like"]].read_text())
            name = fields.texts.get("name", "first")
        keys = form_keys()
        sections: dict[str, list[Any]] = {"Where one begins": [keys[path] for path in FIRST]}
        for path, key in keys.items():
            if path not in FIRST and path != ROOT:
                sections.setdefault(key.section or "the run", []).append(key)
        return _page(
            "configure.html.j2",
            scripts=True,
            url=self.folder.url,
            name=name,
            fields=fields,
            sections=sections,
            configs=self.actions.configs(),
            files={key: describe(path) for key, path in files.items()},
            like=asked.get("like", ""),
            runs=self.folder.runs(),
            **self._can(),
        )

    async def do(self, request: Request) -> Response:
        """One action, asked by a page: {"do": "form"}, "save", or one of `Actions.start`. Answers with JSON."""
        headers, actions = request.headers, self.actions
        asking = headers.get("x-rftdask-asking", "")
        if (
            actions is None
            or headers.get("origin") != f"http://{headers.get('host')}"
            or headers.get("sec-fetch-site", "same-origin") != "same-origin"
            or not secrets.compare_digest(asking.encode(), self._asking.encode())
        ):
            return JSONResponse({"error": "only a page of this studio may ask for that; load it again"}, 403)
        if (
            headers.get("content-type") != "application/json"
            or int(headers.get("content-length", "0")) > _MOST_ASKED_BYTES
        ):
            return JSONResponse({"error": "it is no JSON, or too long"}, 400)
        try:
            asked = parse_object(await request.body())
            return JSONResponse(await run_in_threadpool(self._do, actions, asked))
        except (RftError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)

    def _do(self, actions: Actions, asked: dict[str, Any]) -> dict[str, Any]:
        what, of = str(asked.get("do", "")), str(asked.get("of", ""))
        if what == "form":
            found = actions.check(fields_of(asked), str(asked.get("gpu", "")))
            told = {"yaml": found.yaml, "problems": dict(found.problems), "warnings": found.warnings}
            return {**told, "plan": found.plan, "memory": found.memory}
        if "fields" in asked:
            path = actions.save(of, fields_of(asked), replace=asked.get("replace") is True)
            if what == "save":
                return {"said": f"wrote {path}"}
        return {"said": f"began: {actions.start(what, of).command}"}


def _number(asked: QueryParams, key: str, default: int) -> int:
    numbers = numbers_in([asked[key]]) if key in asked else [default]
    if not numbers or numbers[0] < 0:
        raise DataError(f"{key} must be a number, not {asked[key]!r:.100}")
    return numbers[0]


class StudioServer:
    """The studio on a port of its own.

    Example:
        with StudioServer("runs") as server:
            print(server.address()); server.run()
    """

    def __init__(self, url: str | Path, port: int = 0, *, read_only: bool = False) -> None:
        """Port 0 takes a free one; read_only: it offers no actions.

        Raises: UserError: the port is taken; StorageError: the URL is of no storage.
        """
        import uvicorn  # late: only who serves needs it

        self.folder = Folder(url)
        # Every user of this machine reaches the port; who lacks the token sees nothing.
        self.token = secrets.token_urlsafe(24)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((ADDRESS, port))
            self._socket.listen()  # here, so that who opens the address before `run` waits, and is not refused
        except OSError as error:
            self._socket.close()
            raise UserError(
                f"port {port} of {ADDRESS} cannot be had: {error.strerror}; --port 0 takes a free one"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        self.cookie = f"rftdask-{self.port}"
        """Name of the cookie that keeps the token; browsers tell ports apart by nothing else."""
        app = Studio(self.folder, read_only=read_only).app(self.token, self.cookie)
        # The terminal is the user's: no line for each request.
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, **_SAME
        )
        self._server = uvicorn.Server(config)

    def address(self, path: str = "/", **query: str) -> str:
        """URL of a page, with the token that opens it."""
        return f"http://{ADDRESS}:{self.port}{link(path, query, token=self.token)}"

    def run(self) -> None:
        """Serve until `stop` is called, or a signal comes in the main thread."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True

    def __enter__(self) -> StudioServer:
        return self

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
) -> None:
    """Serve until Ctrl-C. page: to open first; any but the list is one of a run, which `url` then must be.

    Raises: UserError: the port is taken; DataError: there is no run where it must be one, or nothing to be shown.
    """
    storage = open_storage(url)
    if page != "/":
        read_run(storage)
    is_empty = page == "/" and not storage.list()
    if is_empty and read_only:
        raise DataError(f"{storage.url} is empty, or not there; give the folder that runs are below")
    with StudioServer(url, port, read_only=read_only) as server:
        address = server.address(page)
        say(f"{address}  (Ctrl-C ends it)")
        if is_empty:
            say(f"{storage.url} is empty, or not there; what is started from the studio will be there")
        if open_browser:
            webbrowser.open(address)
        try:
            server.run()
        except KeyboardInterrupt:
            say("ended")
