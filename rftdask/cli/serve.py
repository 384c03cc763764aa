"""`rftdask serve`, `view` and `studio`: servers for a policy, the experiences of a run, and a folder of runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from rftdask.cli.common import Overrides, Run, load, say
from rftdask.cli.results.reports import write_experiences_page
from rftdask.config import load_config
from rftdask.run.run_folder import RUN_FILE, read_run_config
from rftdask.serve.server import ServeOptions, serve_policy
from rftdask.storage import open_storage
from rftdask.studio.server import serve as serve_studio

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on (0: a free port)")]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Answer also for this host name; needed behind a proxy, such as JupyterHub's, or with another name",
    ),
]
OpenBrowser = Annotated[bool, typer.Option(help="Open the page in the browser")]


def view(
    run: Run,
    port: Port = 0,
    browser: OpenBrowser = True,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write one HTML page instead of serving")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Number of experiences in the page of --html")] = 100,
    allow_host: Hosts = None,
) -> None:
    """Browse the experiences of a run with their tokens.

    It opens the studio of one run.
    """
    if html:
        write_experiences_page(run, html, limit)
        say(html)
    else:
        hosts = allow_host or ()
        # typer.echo instead of `say`: the printed address has a token that the user needs unescaped.
        serve_studio(run, port, page="/experiences", open_browser=browser, say=typer.echo, hosts=hosts)


def studio(
    folder: Annotated[str, typer.Argument(metavar="[FOLDER]", help="Folder or URL of runs or of one run")] = "runs",
    port: Port = 0,
    browser: OpenBrowser = True,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show only: write, start and stop nothing")] = False,
    allow_host: Hosts = None,
) -> None:
    """Watch, compare, configure, start and stop runs.

    The pages show live curves, answers by step, comparisons and logs. Only this machine can open them.
    """
    hosts = allow_host or ()
    # typer.echo: as in `view`
    serve_studio(folder, port, open_browser=browser, say=typer.echo, read_only=read_only, hosts=hosts)


def serve(
    config: Annotated[str, typer.Argument(metavar="CONFIG|RUN", help="YAML file, or folder or URL of a run")],
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: explorer.listen_address)")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port (default: explorer.proxy_port)")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, help="Number of concurrent requests (default: as engine memory allows)")
    ] = None,
    group_age: Annotated[float, typer.Option(min=0, help="Seconds to wait for other sessions of a task")] = 600,
    tls_cert: Annotated[str, typer.Option(help="Certificate chain (PEM) for HTTPS; needs --tls-key")] = "",
    tls_key: Annotated[str, typer.Option(help="Private key (PEM) of the certificate")] = "",
) -> None:
    """Serve the policy through OpenAI's API.

    Rewarded sessions become experiences for a run in `mode: train`.
    """
    storage = None if config.endswith((".yaml", ".yml")) else open_storage(config)
    if storage is not None and storage.exists(RUN_FILE):
        checked = load_config(read_run_config(storage).to_dict(), overrides or [], was_checked=True)
    else:
        checked, storage = load(config, overrides), None
    options = ServeOptions.of(checked)
    options = dataclasses.replace(
        options,
        host=options.host if host is None else host,
        port=options.port if port is None else port,
        max_concurrent=max_concurrent,
        group_age_s=group_age,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    serve_policy(checked, options, typer.echo, storage)  # typer.echo: the output has the API key
