"""Promise of the pages: what they show works. Each statement of each page (a command, or a block of Python, YAML, JSON
or SQL) is run here, in the order of its page, in a folder with a small run that has ended; the lines of a text block
below a command are among what it printed, whatever their numbers ("..." stands for anything). Or it is in ELSEWHERE,
with the test that runs it, or with the reason why nothing here can. One that is neither fails, because it is run.

A word in capitals is what the reader puts in: WORDS has it. A block with file=NAME is that file.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rftdask import Experiment
from rftdask.config import check_plugins, load_config
from tests.e2e.guides.test_tutorials import WALKS
from tests.integration.run_cases import call_cli, finish
from tests.unit.compat.test_imported_files import GRPO as TRL

pytestmark = pytest.mark.guides

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
DEADLINE_S = 120

HUB = "it needs a model of the Hub, and tests have no network"
GPU = "it takes a GPU, or vLLM"
SLURM = "tests/e2e/clusters/test_slurm_runs.py"
SERVES = "tests/e2e/guides/test_studio_walk.py"
LEARNS = "it takes minutes; it made the table below it"
ELSEWHERE: dict[str, dict[str, str]] = {
    **{f"docs/{page}": {"": "tests/e2e/guides/test_tutorials.py"} for walk in WALKS for page in walk},
    "docs/extending.md": {"": "tests/unit/test_extending_page.py"},
    "README.md": {"make quickstart": ".ci/run", "make test": ".ci/run"},
    "docs/algorithms.md": {
        "python examples/quickstart.py": LEARNS,
        "python -m tests.learning.differences": LEARNS,
        "python -m tests.learning.mutants": LEARNS,
        "python -m tests.learning": "tests/learning/test_learning.py",
    },
    "docs/design.md": {"select explore_step": "it asks a log in a database"},
    "docs/engines.md": {"tests/vllm_engine/install_vllm.sh": GPU, "/tmp/vllm/bin/python": GPU},
    "docs/from-trinity.md": {"rftdask run": "tests/e2e/guides/test_trinity_examples.py"},
    "docs/from-trl.md": {"rftdask validate": HUB, "rftdask run": HUB},
    "docs/gpu.md": {"pip install": GPU},
    "docs/lineage.md": {"rftdask view": SERVES},
    "docs/trainer.md": {
        "rftdask convert runs/gsm8k/qwen2.5-1.5b-grpo/global_step_40 adapter": "tests/unit/driver/test_convert.py",
        "algorithm:\n  optimizer: {optimizer_type: torchao": "tests/unit/trainer/engines/test_optimizer.py",
    },
    "docs/reliability.md": {"rftdask skip": "tests/integration/inputs/test_skipped_step.py"},
    "docs/serve.md": {
        "rftdask serve": "tests/integration/roles/test_served_runs.py",
        "rftdask run": "tests/integration/roles/test_served_runs.py",
        "import httpx": "tests/integration/roles/test_served_runs.py",
    },
    "docs/slurm.md": {
        "rftdask validate run.yaml --data": HUB,
        "rftdask submit run.yaml\n": SLURM,
        "rftdask cancel": SLURM,
        "from rftdask import Experiment": SLURM,
        "salloc": SLURM,
    },
    "docs/studio.md": {"rftdask studio": SERVES, "rftdask view": SERVES},
    "docs/trackers.md": {"rftdask track": "tests/unit/monitor/test_trackers_packages.py"},
    "docs/troubleshooting.md": {"rftdask studio": SERVES},
    "docs/workflows.md": {
        "<python>": "tests/unit/rollouts/workflows/test_workflows_page.py",
        "rftdask debug": "tests/e2e/guides/test_tutorials.py",
    },
    "docs/zh/index.md": {
        "make quickstart": ".ci/run",
        "pip install": "the environment is there",
        "rftdask quickstart": "tests/e2e/guides/test_quickstart.py",
        "rftdask init": "tests/unit/driver/test_init_config.py",
        "rftdask run config/gsm8k-grpo.yaml": HUB,
        "rftdask studio": SERVES,
    },
}
"""Page -> beginning of a statement (<python>: all of that language; "": all of the page) -> the test that runs it, or
the reason why none does.
"""

WORDS = {"CONFIG": "run.yaml", "RUN": "runs/rftdask/quickstart/grpo", "STEP": "2", "NAME": "other", "PARTITION": "main"}
"""Placeholder on a page -> value in this test."""
SMALL = {"global_step_40": "global_step_4", "--step 40": "--step 4", "total_steps=20": "total_steps=5"}
"""Text on a page -> text for the run of this test, which has four steps."""
BASE: dict[str, Any] = {
    "model": {"model_path": "runs/toy/model", "max_model_len": 64},
    "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "default_reward_fn_type": "exact_reward"}},
}
PART_OF: dict[str, dict[str, Any]] = {
    "docs/buffer.md": {"synchronizer": {"sync_style": "fully_async", "max_staleness": 4}},
    "docs/data.md": {
        "mode": "train",
        "algorithm": {"algorithm_type": "dpo"},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "data/pairs.jsonl"}}},
    },
}
"""Page -> the rest of the configuration to which the YAML of the page belongs."""
MAKES_RUN_YAML = {"docs/from-trl.md", "docs/from-verl.md", "docs/slurm.md"}
TRINITY = """
algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: 1e-5}}
model: {model_path: runs/toy/model, max_response_tokens: 4, max_model_len: 64}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 4
  explorer_input:
    taskset: {name: toy, storage_type: file, path: tasks.jsonl, format: {prompt_key: question, response_key: answer}}
    default_workflow_type: math_workflow
explorer: {runner_per_model: 8}
"""
VERL = """
data: {train_files: ~/gsm8k/train.parquet, train_batch_size: 256, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  rollout: {name: vllm, n: 5, tensor_model_parallel_size: 2}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1, project_name: p, experiment_name: e}
"""
NO_CODE = {"text", "mermaid", "{toctree}", "{include}", "{eval-rst}"}


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\S*)(?: +(?:file=)?(\S+))?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(*each) for each in found]


def statements(block: Block) -> list[str]:
    """The commands of a block, each with all of its lines; the whole of any other block."""
    if block.language != "bash":
        return [block.text]
    found, open_text = [], ""
    for line in block.text.splitlines(keepends=True):
        open_text += line
        if not line.endswith("\\\n") and open_text.count('"') % 2 == 0:
            found += [open_text] if open_text.strip() else []
            open_text = ""
    assert not open_text, f"a quotation without an end: {block.text}"
    return found


def elsewhere(page: str, language: str, statement: str) -> str | None:
    """Return the test that runs the statement, or the reason why none does; None: this file runs it."""
    text = f"<{language}>\n{statement}"
    places = ELSEWHERE.get(page, {}).items()
    return next((place for start, place in places if text.startswith(start) or statement.startswith(start)), None)


def is_run_here(page: str) -> bool:
    shown = [block for block in blocks(PAGES[page]) if block.language not in NO_CODE]
    return any(elsewhere(page, block.language, each) is None for block in shown for each in statements(block))


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_names_its_language(page: str) -> None:
    kinds = {block.language for block in blocks(PAGES[page])}
    assert kinds <= {"bash", "python", "yaml", "json", "sql", "jinja", *NO_CODE}, page
    # A block indented by four spaces has no language.
    fenced = re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^(?!.*^ *(?:[-*]|\d+\.) )\n    \S.*", fenced) == []


def test_the_table_of_unrun_examples_matches_the_pages() -> None:
    assert ELSEWHERE.keys() <= PAGES.keys()
    for page, places in ELSEWHERE.items():
        shown = [block for block in blocks(PAGES[page]) if block.language not in NO_CODE]
        texts = [text for block in shown for each in statements(block) for text in (each, f"<{block.language}>\n")]
        for start, place in places.items():
            assert any(text.startswith(start) for text in texts), f"{page} shows no {start!r} any more"
            assert " " in place or (ROOT / place).is_file(), place


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a reader: the configurations, a toy, the quickstart's run with few steps, and files of the user."""
    folder = tmp_path_factory.mktemp("ready")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # for the reward below, in any working directory
        patch.chdir(folder)
        patch.delenv("RFTDASK_RUNS", raising=False)
        shutil.copytree(ROOT / "config", "config")
        assert call_cli("examples", "toy", "runs/toy").code == 0
        config = Path("config/quickstart.yaml")
        tree = yaml.safe_load(config.read_text())
        warmup, grpo = tree["stages"]
        # Enough to answer by numbers, and to be wrong.
        warmup["trainer"]["total_steps"] = 40
        warmup["algorithm"]["optimizer"]["lr"] = 2e-3
        grpo["buffer"]["batch_size"] = 8
        grpo["buffer"]["explorer_input"]["default_reward_fn_type"] = "tests.e2e.toy_reward.even_reward"
        grpo["explorer"]["eval_interval"] = 2
        grpo["trainer"].update(total_steps=4, save_interval=2)
        config.write_text(yaml.safe_dump(tree))
        finish(config)
        stage = {key: value for key, value in grpo.items() if key != "stage_name"}
        own = {key: value for key, value in tree.items() if key != "stages"} | stage | {"name": "run"}
        Path("run.yaml").write_text(yaml.safe_dump(own))
        shutil.copy("runs/toy/train.jsonl", "tasks.jsonl")
        Path("rows").mkdir()
        rows = [{"prompt": f"What is the sum of {n} and 1?", "response": str(n + 1)} for n in (1, 2, 3, 3)]
        Path("rows/sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path("my_scores.py").write_text("def difficulty(row):\n    return len(row['prompt'])\n")
        Path("train.py").write_text(TRL)
        Path("ppo_trainer.yaml").write_text(VERL)
        Path("gsm8k.yaml").write_text(TRINITY)
    yield folder


# A warning of PyTorch about a reader with one process.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("page", [page for page in PAGES if is_run_here(page)])
def test_a_page_works_as_it_is_written(page: str, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = shutil.copytree(ready, tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(here)
    monkeypatch.chdir(here)
    if page in MAKES_RUN_YAML:
        Path("run.yaml").unlink()
    for name in ("runs/gsm8k/qwen2.5-1.5b-grpo", "runs/rftdask/demo"):
        if f"{name}/" in PAGES[page].read_text() or f"{name}\n" in PAGES[page].read_text():
            shutil.copytree(WORDS["RUN"], name)
    before = set(sys.modules)
    reader = Reader(page)
    for block in blocks(PAGES[page]):
        if block.file and block.language not in NO_CODE:
            Path(block.file).write_text(block.text)
        elif block.language == "text":
            reader.look(block.text)
        elif block.language not in NO_CODE:
            reader.output = None
            for statement in statements(block):
                if elsewhere(page, block.language, statement) is None:
                    reader.do(block.language, statement)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(here)):
            del sys.modules[name]


class Reader:
    """Reader that follows a page. `output`: text printed by the commands of the last block; None: no command ran."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.output: str | None = None
        self.names: dict[str, Any] = {}
        frame = Experiment.open(WORDS["RUN"]).experiences()
        answers = frame[(frame["explore_step"] == 3) & frame["response_text"].str.isdecimal()]
        self.uid = str(answers["uid"].iloc[0])

    def do(self, language: str, statement: str) -> None:
        getattr(self, language)(self.filled(statement))

    def filled(self, text: str) -> str:
        for word, stands_for in (WORDS | {"UID": self.uid}).items():
            text = re.sub(rf"\b{word}\b(?!=)", stands_for, text)
        for word, small in SMALL.items():
            text = text.replace(word, small)
        return re.sub(r"taskset_0/0/156/2/0", self.uid, text)

    def bash(self, command: str) -> None:
        if command.startswith("rftdask "):
            ended = call_cli(*shlex.split(command.replace("\\\n", " "), comments=True)[1:])
            code, output = ended.code, ended.out + ended.err
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            code, output = done.returncode, done.stdout + done.stderr
        assert code == 0 and "Traceback" not in output, (command, output)
        self.output = (self.output or "") + output

    def python(self, text: str) -> None:
        exec(text, self.names)

    def yaml(self, text: str) -> None:
        """Check that the text is part of a valid configuration whose plug-ins exist."""
        check_plugins(load_config(merged(merged(BASE, PART_OF.get(self.page, {})), yaml.safe_load(text))))

    def json(self, text: str) -> None:
        for line in text.splitlines():
            json.loads(line)

    def sql(self, text: str) -> None:
        duckdb = pytest.importorskip("duckdb")
        assert duckdb.sql(text).fetchall()

    def look(self, text: str) -> None:
        """Each line is among what was printed, but for numbers, and for what "..." stands for; of a table its head."""
        if self.output is None:
            return
        output = "\n".join(map(shape, self.output.splitlines()))
        for line in text.splitlines():
            expected = ".*".join(re.escape(part) for part in shape(self.filled(line)).split("..."))
            assert re.search(f"^{expected}$", output, re.MULTILINE), (line, self.output)
            if line.startswith("───"):
                break


def shape(line: str) -> str:
    """A line whatever its numbers, hashes and gaps."""
    line = re.sub(r"-?\b[0-9a-f]{8,}\b|-?\d[\d.,]*(?:e-?\d+)?", "0", line)
    return re.sub(r" +|[-─]{2,}", " ", line).strip()


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], value) for key, value in over.items() if isinstance(base.get(key), dict)}
    return {**base, **over, **both}
