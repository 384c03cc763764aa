"""Promises of the documentation as a site: it builds offline without warnings, and all links and anchors exist."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from rftdask.driver.init_config import json_schema
from rftdask.reports.metric_table import METRICS

ROOT = Path(__file__).parents[3]


class Page(HTMLParser):
    """The anchors of a page, the targets of its links, and the resources that a browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := attributes.get(key))}
        if tag == "a" and (target := attributes.get("href")):
            self.links.append(target)
        elif (target := attributes.get("src") or attributes.get("href")) and attributes.get("rel") not in (
            "canonical",
            "index",
        ):
            self.loads.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # Without a network: the proxy does not exist, so requests fail.
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "http_proxy": "http://127.0.0.1:9"}
    env["https_proxy"] = env["http_proxy"]
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "trees")]
    done = subprocess.run(
        [*command, "docs", str(folder / "html")], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    # Pages that Sphinx generates: sources, search and an alphabetical index.
    for path in sorted(site.rglob("*.html")):
        if "_static" not in path.parts:
            yield path, Page(path.read_text())


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there(site: Path) -> None:
    by_path = dict(pages(site))
    assert len(by_path) > 40
    broken = []
    for path, page in by_path.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = by_path[target].anchors if target in by_path else {unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in anchors:
                broken.append((path.name, link))
    assert broken == []


def test_every_link_between_pages_is_a_link_on_the_site(site: Path) -> None:
    docs, lost, num_links = ROOT / "docs", [], 0
    for path, page in pages(site):
        source = docs / path.relative_to(site).with_suffix(".md")
        targets = {(path.parent / unquote(urlsplit(link).path)).resolve() for link in page.links}
        for link in re.findall(r"\]\(([^)#:]+\.md)", source.read_text() if source.exists() else ""):
            target = (source.parent / link).resolve()
            if target.is_relative_to(docs):
                num_links += 1
                if site / target.relative_to(docs).with_suffix(".html") not in targets:
                    lost.append((source.name, link))
    assert lost == [] and num_links > 100


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for path, page in pages(site):
        assert [url for url in page.loads if urlsplit(url).netloc] == [], path
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text() and "@import" not in style.read_text(), style


def test_the_reference_has_every_key_metric_and_command(site: Path) -> None:
    keys = (site / "reference" / "config.html").read_text()
    for section in json_schema()["$defs"].values():
        assert [key for key in section.get("properties", {}) if f">{key}</span>" not in keys] == []
    metrics = (site / "reference" / "metrics.html").read_text()
    assert [name for name in METRICS if f">{name}</span>" not in metrics] == []
    commands = (site / "reference" / "commands.html").read_text()
    assert [name for name in ("submit", "import", "push") if f'id="rftdask-{name}"' not in commands] == []
    assert "Experiment.from_yaml" in (site / "reference" / "api.html").read_text()
