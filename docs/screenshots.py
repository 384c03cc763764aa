"""Takes all pictures of docs/images again: makes the runs that they show and opens the studio in a headless Chromium.

    python -m docs.screenshots /scratch/demo

The folder keeps the runs, and the pictures show its path. A run with a report is not repeated. The six runs of a toy
take some minutes on two cores. Look at the pictures before you commit them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

import yaml
from PIL import Image

from rftdask import Experiment
from tests.e2e.guides.browser import LAPTOP, PHONE, Chromium
from tests.e2e.guides.test_studio import studio

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LONG = (LAPTOP[0], 1800)
MOST_BYTES = 300_000
RUN, LOOKS = "rftdask/quickstart", "recipes/images"
DRAWN = "document.body.dataset.drawn > 5"


def make_runs() -> None:
    """Run the quickstart, GRPO from its warm-up with two learning rates and two seeds each, and the image recipe."""
    if not has_ended(RUN):
        run(sys.executable, str(ROOT / "examples" / "quickstart.py"))
    tree = yaml.safe_load((ROOT / "config" / "quickstart.yaml").read_text())
    grpo = {key: value for key, value in tree["stages"][1].items() if key != "stage_name"}
    tree = {key: value for key, value in tree.items() if key != "stages"} | grpo
    tree["model"]["model_path"] = f"runs/{RUN}/warmup/global_step_320/actor/huggingface"
    Path("grpo.yaml").write_text(yaml.safe_dump(tree))
    for rate in ("1e-4", "4e-4"):
        for seed in (1, 2):
            name = f"lr-{rate}-seed-{seed}"
            if not has_ended(f"rftdask/{name}"):
                cli("run", "grpo.yaml", f"name={name}", f"algorithm.optimizer.lr={rate}", f"seed={seed}")
    if not Path("images.yaml").exists():
        cli("examples", "copy", "images")
        run(sys.executable, "images.py")
    if not has_ended(LOOKS):
        cli("run", "images.yaml")


def has_ended(name: str) -> bool:
    return Path("runs", name, "report.html").exists()


def run(*command: str) -> None:
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT), "RFTDASK_RUNS": "runs"}, check=True)


def cli(*words: str) -> None:
    run(sys.executable, "-m", "rftdask", *words)


def place(name: str) -> dict[str, str]:
    """Location of an experience of the last step of a run, as the query of its page."""
    query = "select stage, shard, row, task_index from experiences order by explore_step desc, shard, row limit 1"
    return {key: str(value) for key, value in Experiment.open(f"runs/{name}").sql(query).iloc[0].items()}


def take(browser: Chromium, root: str) -> None:
    """Take all pictures. The table has name, page, query, size and color scheme."""
    last, look = place(RUN), place(LOOKS)
    of_run = {"run": RUN}
    seeds = [("run", f"rftdask/lr-{rate}-seed-{seed}") for rate in ("1e-4", "4e-4") for seed in (1, 2)]
    task = {**of_run, "evals": "no", "taskset": "taskset_0", "stage": last["stage"], "task_index": last["task_index"]}
    sql = "select explore_step, avg(reward) as reward, count(*) as n from experiences group by 1 order by 1"
    for picture, page, query, size, dark in (
        ("runs", "", {}, LAPTOP, False),
        ("run", "run", of_run, LONG, False),
        ("compare", "compare", seeds, LONG, False),
        ("samples", "samples", of_run, LAPTOP, False),
        ("task", "task", task, LAPTOP, False),
        ("distributions", "distributions", of_run, LONG, False),
        ("experiences", "experiences", of_run, LAPTOP, False),
        ("experience", "experience", {**of_run, **last}, LAPTOP, False),
        ("image", "experience", {"run": LOOKS, **look}, LAPTOP, False),
        ("sql", "sql", {**of_run, "q": sql}, LAPTOP, False),
        ("cluster", "cluster", of_run, LAPTOP, False),
        ("logs", "logs", of_run, LAPTOP, False),
        ("about", "about", of_run, LONG, False),
        ("configure", "configure", of_run, LAPTOP, False),
        ("groups", "groups", {**of_run, "evals": "no"}, PHONE, False),
        ("samples-phone", "samples", of_run, PHONE, True),
        ("configure-phone", "configure", of_run, PHONE, False),
        ("report", "", {}, LONG, False),
    ):
        browser.resize(*size, dark=dark)
        report = Path("runs", RUN, "report.html").absolute().as_uri()
        browser.open(report if picture == "report" else f"{root}/{page}?{urlencode(query)}")
        if picture == "sql":  # a query from a link does not run until the user asks for it
            browser.evaluate("document.querySelector('form button').click()")
            browser.wait_for("document.querySelector('td')")
        if picture in ("run", "compare", "report"):
            browser.wait_for(DRAWN)
        if page == "configure":
            browser.wait_for("document.body.dataset.checked > 0")
        assert browser.evaluate("document.documentElement.scrollWidth") <= size[0], f"{picture} is too wide"
        path = IMAGES / f"studio-{picture}.png"
        browser.screenshot(path)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        assert path.stat().st_size < MOST_BYTES, path
    assert browser.errors == [], browser.errors


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    make_runs()
    with studio(Path("runs")) as url, Chromium() as browser:
        browser.open(url)  # the token in the URL becomes a cookie
        take(browser, url.partition("/?")[0])
    print(f"{len(list(IMAGES.iterdir()))} pictures in {IMAGES}")


if __name__ == "__main__":
    main(*sys.argv[1:])
