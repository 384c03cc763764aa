"""A user's path through the studio, from an empty folder to a job on SLURM, in a real browser with clicks and keys;
only the reward is written as a file. The user configures a run with custom tasks and a custom reward, sees why it
does not learn, fixes the reward, sees that it learns, compares both runs, and submits the better one.
"""

import json
import os
from pathlib import Path

import pytest

from rftdask.cluster.jobs import read_jobs
from rftdask.cluster.slurm import SlurmCluster
from rftdask.storage import open_storage
from tests.e2e.clusters.test_slurm_runs import has_slurm
from tests.e2e.guides.browser import Chromium
from tests.e2e.guides.test_studio import studio
from tests.e2e.toy_runs import build_tiny_model

DEADLINE_S = 400.0
STATE = "document.querySelector('#started .chip')?.textContent"
"""JavaScript for the command that was started last."""
ALWAYS_WRONG = '''
def plain(response, truth, task):
    """1 for an answer in plain letters."""
    return float(response == truth + ".")
'''
MENDED = '''
def plain(response, truth, task):
    """The share of its characters that are plain ones."""
    return sum(ord(each) < 128 for each in response) / max(1, len(response))
'''


def click(browser: Chromium, text: str, among: str = "a, button") -> None:
    browser.wait_for(f"[...document.querySelectorAll('{among}')].find((each) => each.textContent.trim() === '{text}')")
    browser.evaluate(
        f"[...document.querySelectorAll('{among}')].find((each) => each.textContent.trim() === '{text}').click()"
    )


def fill(browser: Chromium, **texts: str) -> None:
    """Type into fields of the form; "__" stands for the dot of a key."""
    for name, text in texts.items():
        browser.evaluate(
            f"var field = document.getElementById('k-{name.replace('__', '.')}'); field.value = {json.dumps(text)}; "
            "field.dispatchEvent(new Event('input', {bubbles: true}))"
        )


def looked(browser: Chromium, condition: str = "document.getElementById('problem').textContent === ''") -> None:
    """Wait until the server has checked the form."""
    browser.wait_for(f"document.body.dataset.checked > 0 && ({condition})")


def ended(browser: Chromium, what: str, of: str) -> tuple[str, str]:
    """Return how the command that was started last ended, once it has ended, and its output."""
    summary = "document.querySelector('#started summary').textContent.split(/\\s+/)"
    browser.wait_for(f"{summary}.includes('{what}') && {summary}.includes('{of}') && {STATE} !== 'running'", DEADLINE_S)
    return browser.evaluate(STATE), browser.evaluate("document.querySelector('#started pre').textContent")


def open_run(browser: Chromium, run: str) -> None:
    browser.open(f"{browser.evaluate('location.origin')}/run?run={run.replace('/', '%2F')}")
    browser.wait_for("document.body.dataset.drawn > 5")


def configure_the_first(browser: Chromium) -> None:
    """Errors are shown at their keys and nothing can be started; after a fix the run starts."""
    click(browser, "New run")
    looked(browser, "document.querySelectorAll('.key.wrong').length >= 2")
    fill(
        browser,
        name="first",
        model__model_path="model",
        model__max_prompt_tokens="16",
        model__max_response_tokens="4",
        buffer__explorer_input__taskset__path="tasks.jsonl",
        buffer__explorer_input__taskset__format__prompt_type="raw",
        buffer__explorer_input__taskset__format__prompt_key="question",
        buffer__explorer_input__taskset__format__response_key="answer",
        buffer__explorer_input__default_reward_fn_type="my_rewards.plain",
        explorer__plugin_dirs="[.]",
        algorithm__repeat_times="eight",
        algorithm__kl_loss_fn="none",
        algorithm__optimizer__lr="2e-2",
        buffer__batch_size="4",
        buffer__total_epochs="20",
        trainer__total_steps="8",
        cluster__num_cpus="2",
        monitor__monitor_type="none",
    )
    looked(browser, "document.querySelectorAll('.key.wrong').length === 1")
    problem = "document.querySelector('[data-key=\"algorithm.repeat_times\"] .problem').textContent"
    assert browser.evaluate(problem) == "'eight' is not a whole number"
    start = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'Save and start here')"
    assert browser.evaluate(f"{start}.disabled") is True
    fill(browser, algorithm__repeat_times="8")
    looked(browser)
    plan = browser.evaluate("document.getElementById('plan').textContent")
    assert "tasks per epoch  4" in plan and "train steps      8" in plan
    assert "weights" in browser.evaluate("document.getElementById('memory').textContent")
    click(browser, "Save and start here")


def see_why_it_does_not_learn(browser: Chromium) -> None:
    open_run(browser, "rftdask/first")
    warning = browser.evaluate("document.getElementById('warnings').textContent")
    assert "all rewards of the last 5 steps are 0" in warning
    click(browser, "read the last answers")
    browser.wait_for("document.querySelectorAll('.answer').length >= 4")
    text = browser.evaluate("document.body.textContent")
    assert "(no learning signal)" in text and "expected: red" in text


def compare_both(browser: Chromium) -> None:
    """The comparison shows that the code of the reward differs, and that only one of the runs learns."""
    browser.open(browser.evaluate("location.origin"))
    browser.evaluate("for (const box of document.querySelectorAll('#runs input')) box.click()")
    browser.evaluate("compare.click()")
    browser.wait_for("document.body.dataset.drawn > 5")
    keys = browser.evaluate("[...document.querySelectorAll('tbody code')].map((key) => key.textContent)")
    assert keys == ["sources.my_rewards"]
    curve = "[run.run, run.stages[0].y['trainer.reward'].trainer]"
    rewards = browser.evaluate(f"Object.fromEntries(window.curves.data.runs.map((run) => {curve}))")
    better = rewards["rftdask/first-2"]
    assert set(rewards["rftdask/first"]) == {0} and len(better) == 8
    assert sum(better[-3:]) > sum(better[:3]), better


def submit(browser: Chromium, python_path: str) -> tuple[str, str]:
    """Show the scripts first, then the result of submitting them."""
    roles = {
        f"cluster__slurm__{role}__{key}": text
        for role in ("controller", "trainer", "explorer")
        for key, text in {
            "partition": "main",
            "walltime": "00:10:00",
            "prologue": f'["export PYTHONPATH={python_path} OMP_NUM_THREADS=1"]',
        }.items()
    }
    fill(browser, name="cluster", cluster__type="slurm", cluster__num_cpus="", cluster__interface="lo", **roles)
    looked(browser)
    browser.evaluate("document.getElementById('save-as').value = 'cluster'")
    click(browser, "Save and show scripts")
    state, output = ended(browser, "dry-run", "cluster")
    assert state == "finished" and "#SBATCH --partition=main" in output, output
    click(browser, "Save and submit")
    return ended(browser, "submit", "cluster")


def test_from_an_empty_folder_to_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)  # base folder of the paths of a configuration
    build_tiny_model(tmp_path / "model")
    rows = [{"question": f"say {word}:", "answer": word} for word in ("red", "blue", "green", "white")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(ALWAYS_WRONG)
    with studio(tmp_path / "runs") as url, Chromium() as browser:
        browser.open(url)
        configure_the_first(browser)
        state, output = ended(browser, "start", "first")
        assert state == "finished" and "first finished" in output, output
        assert (tmp_path / "runs/configs/first.yaml").exists()
        see_why_it_does_not_learn(browser)

        # The reward expects a full stop that no answer has. Fix it, in a new run.
        (tmp_path / "my_rewards.py").write_text(MENDED)
        open_run(browser, "rftdask/first")
        click(browser, "New run from this one")
        looked(browser)
        assert browser.evaluate("document.getElementById('k-name').value") == "first-2"
        click(browser, "Save and start here")
        state, output = ended(browser, "start", "first-2")
        assert state == "finished" and "first-2 finished" in output, output
        compare_both(browser)

        open_run(browser, "rftdask/first-2")
        click(browser, "New run from this one")
        looked(browser)
        state, output = submit(browser, f"{os.environ['PYTHONPATH']}:{tmp_path}")
        if has_slurm():
            assert state == "finished" and "submitted controller as job" in output
            jobs = read_jobs(open_storage(tmp_path / "runs/rftdask/cluster"))
            assert jobs
            SlurmCluster.cancel(*(job.job_id for job in jobs))
        else:  # then the page reports that
            assert state == "failed" and "sinfo" in output, output
        assert browser.errors == []
