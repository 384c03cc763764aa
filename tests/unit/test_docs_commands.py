"""Promises of commands shown in the documentation and in comments of configurations:

- with --gpus, --nodes and --gpu for 1, 2, 8 and 4 x 8 GPUs, each has a plan with its memory, or is rejected with a
  remedy that leads to one;
- a command that names its GPUs runs as printed, and a recipe that names them has a plan there;
- typed in an empty folder with the files of its page, each is accepted.

Examples in examples/ are toys for a laptop, which tests/e2e/guides runs.
"""

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rftdask.cluster.layout import Layout, plan_machines
from rftdask.config import load_config
from rftdask.driver.memory_estimate import gpu_bytes, what_fits
from rftdask.models.model_shape import read_shape
from tests.integration.run_cases import call_cli
from tests.unit.compat.test_imported_files import GRPO as TRL
from tests.unit.test_docs_pages import TRINITY, VERL

pytestmark = pytest.mark.guides

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "config").rglob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *CONFIGS]
MACHINES = [(1, 1), (1, 2), (1, 8), (4, 8)]
"""(machines, GPUs of each)."""
ONE_GPU = (
    "explorer.rollout_model.engine_num=1",
    "buffer.batch_size=16",
    "trainer.num_ranks=1",
    "trainer.trainer_strategy=single",
    "trainer.max_token_len_per_gpu=4096",
    "trainer.gradient_checkpointing=true",
)
"""Settings that config/gsm8k-grpo.yaml suggests for one GPU."""
_ADVICE = re.compile(r"(engine_num|num_ranks|tensor_parallel_size)\D* (\d+)")
_KEYS = {
    "engine_num": "explorer.rollout_model.engine_num",
    "num_ranks": "trainer.num_ranks",
    "tensor_parallel_size": "explorer.rollout_model.tensor_parallel_size",
}
_FILES = {path.name: str(path.relative_to(ROOT)) for path in CONFIGS}
IN_REPOSITORY = {"README.md": "in this folder installs everything a run needs", "docs/zh/index.md": "在仓库目录里"}
"""Pages whose reader has the repository's folder before him, and where they say so."""
_COMMAND = re.compile(r"rftdask ((?:run|validate|estimate|submit) [^\n`|&;]*\.yaml[^\n`|&;]*)")
_OWN = "init {file} --tasks tasks.jsonl --model toy/model --yes"
_SLURM = f"{_OWN} --slurm main"
# The tests download nothing and have no vLLM.
_TRL = TRL.replace("Qwen/Qwen2.5-0.5B-Instruct", "toy/model").replace('"openai/gsm8k", "main"', '"tasks.jsonl"')
_REWARD = "def reward(response, truth, task):\n    return float(response == truth)\n"
OWN_FILES = {
    "docs/from-trinity.md": {"gsm8k.yaml": TRINITY},
    "docs/from-trl.md": {
        "train.py": _TRL.replace("use_vllm=True", "use_vllm=False"),
        "run.yaml": "import trl train.py --out {file}",
        "plugins/my_rewards.py": _REWARD,
    },
    "docs/from-verl.md": {"ppo_trainer.yaml": VERL, "run.yaml": "import verl ppo_trainer.yaml --out {file}"},
    "docs/slurm.md": {"run.yaml": _SLURM},
    "docs/tutorials/your-cluster.md": {"run.yaml": _SLURM, "gpus-32.yaml": "examples copy gpus-32"},
}
"""Page -> file of its reader -> its text, or the command that writes it; of others `_OWN` does."""


def shown(page: Path) -> list[str]:
    """The commands of a page, each in a line."""
    return _COMMAND.findall(re.sub(r"\\\n#? *", " ", page.read_text()))


def commands() -> dict[tuple[str, ...], tuple[str, ...]]:
    """(config, override...) of every `rftdask run`, `validate`, `estimate` or `submit` of a config -> the words of one
    such command as printed.
    """
    result = {}
    for page in PAGES:
        for line in shown(page):
            words = [_FILES.get(Path(word).name, word) for word in shlex.split(line, comments=True)]
            if config := next((word for word in words if word in _FILES.values()), None):
                made_of = (config, *(word for word in words if re.match(r"[a-z_.]+=", word)))
                if made_of not in result or "--gpu" in words:
                    result[made_of] = tuple(words)
    return result


def plan(command: tuple[str, ...], num_machines: int, num_gpus: int) -> Layout:
    path, *overrides = command
    cluster = [f"cluster.gpu_per_node={num_gpus}", f"cluster.node_num={num_machines}"]
    return plan_machines(load_config(ROOT / path, [*overrides, *cluster]))


@pytest.mark.parametrize("machines", MACHINES, ids=lambda machines: "{}x{}".format(*machines))
@pytest.mark.parametrize("command", sorted(commands()), ids=" ".join)
def test_a_documented_command_has_a_plan_or_a_remedy(
    command: tuple[str, ...], machines: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    there = ("--nodes", str(machines[0]), "--gpus", str(machines[1]), "--gpu", "H100 80GB")
    changes: list[str] = []
    for _ in range(3):
        ended = call_cli("estimate", *command, *changes, *there)
        if ended.code == 0:
            break
        printed = " ".join(ended.err.split())
        advised = [f"{_KEYS[key]}={number}" for key, number in _ADVICE.findall(printed.rpartition("; ")[2])]
        advised += ["cluster.type=joined"] if "use slurm or another batch system, or joined" in printed else []
        advised += ["cluster.type=local", "mode=colocate"] if "cluster.type local, mode colocate" in printed else []
        assert ended.code == 2 and advised, f"{command} on {machines}: {printed}"
        changes += advised
    assert ended.code == 0, f"{command} on {machines}, changed by {changes}: {ended.err}"
    assert "placement  " in ended.out and "host of a machine" in ended.out
    assert re.search(r": (fits|does not fit), \d", ended.out)


@pytest.mark.parametrize("command", [words for words in commands().values() if "--gpu" in words], ids=" ".join)
def test_a_command_that_names_its_gpus_fits_them(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ended = call_cli(*command)
    assert ended.code == 0, ended
    assert ": fits, " in ended.out and "does not fit" not in ended.out, ended.out


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    assert call_cli("examples", "toy", str(folder / "toy")).code == 0
    return folder


@pytest.fixture
def empty(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a folder with nothing in it but a model and tasks."""
    (tmp_path / "toy").symlink_to(toy / "toy")
    rows = [{key: f"{n}" for key in ("question", "answer", "prompt", "solution")} for n in range(300)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFTDASK_RUNS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(tmp_path))  # where this machine's SLURM is not
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_work_in_an_empty_folder(page: Path) -> None:
    """A run and a submission are checked and planned; nothing is started or submitted."""
    name = str(page.relative_to(ROOT))
    own = dict(OWN_FILES.get(name, {}))
    own |= dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
    for line in shown(page):
        verb, *words = [word for word in shlex.split(line, comments=True) if word != "KEY=VALUE"]
        if name in IN_REPOSITORY:
            assert IN_REPOSITORY[name] in page.read_text()
            words = [str(ROOT / word) if word.startswith("config/") else word for word in words]
        for file in [*own, *(word for word in words if word.endswith(".yaml") and "=" not in word)]:
            if Path(file).exists():
                continue
            if file.startswith("config/"):  # the error of this command suggests it
                assert call_cli("examples", "copy", file, str(Path(file).parent)).code == 0
                continue
            Path(file).parent.mkdir(exist_ok=True)
            text = own.get(file, _SLURM if verb == "submit" else _OWN)
            if "\n" in text:
                Path(file).write_text(text)
            else:
                ended = call_cli(*shlex.split(text.format(file=file)))
                assert ended.code == 0, (name, file, ended)
            if f"\npython {file}\n" in page.read_text():
                runpy.run_path(file)
        words += ["--dry-run"] * (verb == "submit" and not {"--dry-run", "--print-templates"} & set(words))
        ended = call_cli("validate" if verb == "run" else verb, *words)
        assert ended.code == 0 and "Traceback" not in ended.err, (name, verb, words, ended)


def test_gpu_configurations_sample_with_vllm() -> None:
    for_gpus = [path for path in CONFIGS if path.parent.name in ("gpus", "slurm") or path.name.startswith("gsm8k")]
    assert len(for_gpus) >= 9
    for path in for_gpus:
        stages = load_config(path).stage_configs()
        assert {item.explorer.rollout_model.engine_type for item in stages if item.has_explorer} == {"vllm"}, path


def test_a_recipe_has_a_plan_on_its_gpus() -> None:
    recipes = [command for command in commands() if command[0] == "config/gsm8k-grpo.yaml"]
    assert ("config/gsm8k-grpo.yaml",) in recipes
    assert plan(("config/gsm8k-grpo.yaml",), 1, 8).describe() == "2 ranks on GPUs 0-1, 6 engines on GPUs 2-7"
    one = ("config/gsm8k-grpo.yaml", *ONE_GPU)
    assert one in recipes
    assert plan(one, 1, 1).colocated
    assert not plan(one, 1, 2).colocated


@pytest.mark.parametrize(
    ("changes", "num_gpus", "memory"),
    [((), 8, "80GB"), (ONE_GPU, 1, "80GB"), ((*ONE_GPU, "model.lora_configs=[{lora_rank: 16}]"), 1, "24GB")],
)
def test_a_recipe_fits_its_gpus(changes: tuple[str, ...], num_gpus: int, memory: str) -> None:
    config = load_config(ROOT / "config" / "gsm8k-grpo.yaml", [*changes, f"cluster.gpu_per_node={num_gpus}"])
    lines = what_fits(config, read_shape(config.model.model_path), gpu_bytes(memory), plan_machines(config))
    verdicts = [line for line in lines if not line.startswith(" ")]
    assert len(verdicts) == 2 and all(": fits, " in line for line in verdicts), lines


def test_validate_plans_for_other_machines() -> None:
    config, one = str(ROOT / "config" / "gsm8k-grpo.yaml"), "explorer.rollout_model.engine_num=1"
    ended = call_cli("validate", config, one, "trainer.num_ranks=1", "--gpus", "1")
    assert ended.code == 0, ended
    assert ended.out.endswith("placement  1 rank on GPU 0, 1 engine on GPU 0; they take turns on GPU 0 (colocate)\n")
    ended = call_cli("validate", config, "--gpus", "8", "--nodes", "4")
    assert ended.code == 2, ended
    assert "cluster.node_num is 4, and cluster.type local is one machine" in " ".join(ended.err.split())
    ended = call_cli("validate", config, "cluster.type=joined", "--gpus", "8", "--nodes", "4")
    assert ended.out.endswith("placement  2 ranks, 6 engines\n"), ended


def test_plan_and_placement_have_the_same_ranks() -> None:
    config, engines = str(ROOT / "config" / "gsm8k-grpo.yaml"), "explorer.rollout_model.engine_num=4"
    arguments = ("validate", config, "trainer.num_ranks=null", engines)
    ended = call_cli(*arguments, "--gpus", "8")
    assert "\ntrainer          4 x torch rank" in ended.out, ended
    assert ended.out.endswith("placement  4 ranks on GPUs 0-3, 4 engines on GPUs 4-7\n"), ended
