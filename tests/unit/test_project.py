"""The shape of the project. The two import rules are functions of a folder, so small invented packages show below that
they can fail.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.project

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

LAYERS = (
    {"errors"},
    {"storage"},
    {"config", "processes"},
    {"data", "monitor", "synchronizer"},
    {"algorithm", "models"},
    {"buffer", "engines"},
    {"cluster", "run"},
    {"rollouts", "trainer"},
    {"compat", "explorer", "reports", "serve", "testing"},
    {"driver"},
    {"studio"},
    {"cli"},
    {"", "__main__"},  # the package itself, which users import
)
"""Names below `rftdask` of the packages and modules of each layer, the lowest first; the longest that fits counts."""

MOST_ENTRIES = 15
"""Bound for a folder below the top, counting its __init__.py, so that a reader can take it in at a glance."""

Graph = dict[str, set[str]]


@functools.cache
def parse(source: str) -> ast.Module:
    """Its syntax tree; once for all tests that look at the package's."""
    return ast.parse(source)


def read_modules(package: Path) -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module of the package, without importing any."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        trees[".".join(parts).removesuffix(".__init__")] = parse(path.read_text())
    return trees


def imported_names(module: str, is_package: bool, tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name or None) of every import anywhere in the tree: late ones and those for type checking count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((source, alias.name) for alias in node.names)


def import_graph(package: Path) -> Graph:
    """Module -> modules of the package that it imports. `from p import m` means the module p.m where there is one."""
    trees = read_modules(package)
    packages = {name for name in trees if any(other.startswith(name + ".") for other in trees)}
    graph: Graph = {name: set() for name in trees}
    for name, tree in trees.items():
        for source, item in imported_names(name, name in packages, tree):
            target = f"{source}.{item}" if f"{source}.{item}" in trees else source
            if (target, item) == (package.name, "__version__"):
                continue  # a constant, not what the package offers
            if target in trees and target != name:
                graph[name].add(target)
    return graph


def place(module: str) -> str:
    """The name in LAYERS that a module goes by; its first name below the package where there is none."""
    below = module.partition(".")[2]
    names = [name for names in LAYERS for name in names if f"{below}.".startswith(f"{name}.") or name == below]
    return max(names, key=len, default=below.partition(".")[0])


def layer_problems(graph: Graph) -> list[str]:
    """A sentence for every import that does not point downward and every module without a layer."""
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    unknown = sorted({place(module) for module in graph} - level.keys())
    problems = [f"{name} has no layer: place it in LAYERS in {Path(__file__).name}" for name in unknown]
    for module, targets in graph.items():
        for target in sorted(targets):
            here, there = place(module), place(target)
            if here != there and {here, there} <= level.keys() and level[there] >= level[here]:
                problems.append(f"{module} imports {target}, which is in no lower layer")
    return problems


def find_cycle(graph: Graph) -> list[str]:
    """The modules of one cycle in order, the first repeated at the end; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module]):
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def test_imports_point_one_way():
    assert layer_problems(import_graph(ROOT / "rftdask")) == []


def test_the_design_lists_the_lowest_layer_first():
    listed = re.findall(r"^  (\w+)/ ", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    levels = [number for folder in listed for number, names in enumerate(LAYERS) if folder in names]
    assert len(levels) == len(listed) and levels == sorted(levels)


def test_no_modules_form_an_import_cycle():
    assert find_cycle(import_graph(ROOT / "rftdask")) == []


def late_imports_without_a_reason(package: Path) -> list[str]:
    """file:line of the imports inside functions that neither a comment in their block of imports explains, nor the
    docstring of their module, which then names its late imports.
    """
    found = set()
    for path in sorted(package.rglob("*.py")):
        tree, lines = parse(path.read_text()), path.read_text().splitlines()
        if re.search(r"\blate\b", ast.get_docstring(tree) or ""):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in (node for function in functions for node in ast.walk(function)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                first, last = node.lineno - 1, node.end_lineno or node.lineno
                while lines[first - 1].strip().startswith(("import ", "from ", "#")):
                    first -= 1
                while lines[last].strip().startswith(("import ", "from ", "#")):
                    last += 1
                if not any("#" in line for line in lines[first:last]):
                    found.add(f"{path.relative_to(package.parent)}:{node.lineno}")
    return sorted(found)


def test_every_late_import_has_a_reason(tmp_path):
    assert late_imports_without_a_reason(ROOT / "rftdask") == []
    (tmp_path / "module.py").write_text("def f():\n    import torch\n\n    return torch\n")
    assert late_imports_without_a_reason(tmp_path) == [f"{tmp_path.name}/module.py:2"]


def invent(folder: Path, **sources: str) -> Graph:
    """The import graph of an invented package; `buffer__log="..."` is the source of rftdask/buffer/log.py."""
    for name, source in sources.items():
        path = folder / "rftdask" / (name.replace("__", "/") + ".py")
        for parent in [path.parent, *path.parent.parents]:
            parent.mkdir(parents=True, exist_ok=True)
            if parent.is_relative_to(folder / "rftdask"):
                (parent / "__init__.py").touch()
        path.write_text(source)
    return import_graph(folder / "rftdask")


def upward(target):
    return [f"rftdask.buffer.log imports {target}, which is in no lower layer"]


UPWARD = upward("rftdask.trainer.loop")


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("from rftdask.storage.base import Store\nimport rftdask.errors", []),
        ("import rftdask.trainer.loop", UPWARD),
        ("from rftdask.trainer.loop import run", UPWARD),
        ("from rftdask.trainer import loop", UPWARD),
        ("from ..trainer import loop", UPWARD),
        ("def late():\n    from rftdask.trainer.loop import run", UPWARD),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rftdask.trainer.loop import run", UPWARD),
        ("from rftdask.engines import base", upward("rftdask.engines.base")),
        ("from rftdask import Experiment", upward("rftdask")),
        ("from rftdask import __version__", []),
    ],
)
def test_only_imports_of_lower_layers_are_allowed(tmp_path, source, problems):
    graph = invent(tmp_path, buffer__log=source, trainer__loop="", engines__base="", storage__base="", errors="")
    assert layer_problems(graph) == problems


def test_a_module_without_a_layer_is_named(tmp_path):
    assert layer_problems(invent(tmp_path, util="")) == ["util has no layer: place it in LAYERS in test_project.py"]


def test_a_cycle_is_found_through_late_and_relative_imports(tmp_path):
    ledger = "def late():\n    import rftdask.buffer.log"
    shard = "from rftdask.buffer.ledger import read"
    graph = invent(tmp_path, buffer__log="from . import shard", buffer__shard=shard, buffer__ledger=ledger)
    cycle = ["rftdask.buffer.ledger", "rftdask.buffer.log", "rftdask.buffer.shard", "rftdask.buffer.ledger"]
    assert find_cycle(graph) == cycle


def test_a_package_that_reexports_its_modules_is_not_a_cycle(tmp_path):
    invent(tmp_path, buffer__log="", buffer__shard="from rftdask.buffer import log")
    (tmp_path / "rftdask/buffer/__init__.py").write_text("from rftdask.buffer.shard import Shard\nfrom .log import Log")
    assert find_cycle(import_graph(tmp_path / "rftdask")) == []


def test_every_test_file_has_a_name_of_its_own():
    # pytest imports a test file by its bare name: two of one name are an error of the collection, after minutes.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def late_marks(folder: Path) -> list[str]:
    """Lines below the first test of a file that mark or skip all of its tests, also those above."""
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        has_tests = False
        for node in parse(path.read_text()).body:
            has_tests |= getattr(node, "name", "").lower().startswith("test")
            if has_tests and re.match(r"pytestmark =|pytest\.importorskip", ast.unparse(node)):
                found.append(f"{path.name}:{node.lineno}")
    return found


def test_marks_of_a_test_file_precede_its_tests(tmp_path):
    assert late_marks(ROOT / "tests") == []
    marked = "pytestmark = 1\n\ndef test_x(): pass\n\npytestmark = 2\npytest.importorskip('x')\n"
    (tmp_path / "test_marked.py").write_text(marked)
    assert late_marks(tmp_path) == ["test_marked.py:5", "test_marked.py:6"]


NO_TORCH = "torch transformers vllm"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rftdask", f"{NO_TORCH} distributed pandas"),
        ("rftdask.config", f"{NO_TORCH} distributed pandas"),
        ("rftdask.storage", f"{NO_TORCH} distributed pandas"),
        # The first runs on a login node, the second on an explorer's worker.
        ("rftdask.driver.preflight", f"{NO_TORCH} safetensors"),
        ("rftdask.rollouts.work_unit_task", f"{NO_TORCH} safetensors pandas"),
        # Starts the fork server of a run, which imports torch while the driver imports Dask.
        ("rftdask.cluster.local", "torch transformers distributed pandas"),
        # A fake rank needs no compiler.
        (
            "rftdask.trainer.rank, rftdask.driver.preflight",
            "torch._dynamo torch.distributed.checkpoint torch.distributed.tensor transformers distributed",
        ),
    ],
)
def test_early_imports_load_no_heavy_packages(module, heavy):
    code = f"import sys, {module}; print(*sorted({set(heavy.split())!r} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def folder_problems(package: Path) -> list[str]:
    """A sentence for every folder of the package without a docstring, and every one below the top that is too full."""
    problems = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        opening = folder / "__init__.py"
        if not (opening.is_file() and ast.get_docstring(parse(opening.read_text()))):
            problems.append(f"{folder.relative_to(package)}/ has no __init__.py with a docstring")
    return problems + full_folders(package)


def full_folders(package: Path) -> list[str]:
    """A sentence for every folder below the top that is too full."""
    # Compiled files are skipped, since a checkout keeps those of a folder that has moved away.
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    entries: dict[Path, set[str]] = {}
    for path in files:
        for folder, entry in zip(path.parents, (path, *path.parents), strict=False):
            if folder.is_relative_to(package) and folder != package:
                entries.setdefault(folder.relative_to(package), set()).add(entry.name)
    counts = {folder: len(names) for folder, names in sorted(entries.items())}
    return [f"{f}/ has {n} entries, more than {MOST_ENTRIES}" for f, n in counts.items() if n > MOST_ENTRIES]


def test_every_folder_has_a_docstring_and_few_files(tmp_path):
    assert folder_problems(ROOT / "rftdask") == []
    # The folder of unit tests mirrors the top of the package.
    assert [problem for problem in full_folders(ROOT / "tests") if not problem.startswith("unit/ ")] == []
    invent(tmp_path, buffer__log="", **{f"trainer__part{number}": "" for number in range(15)})
    for folder in ("", "trainer/"):
        (tmp_path / f"rftdask/{folder}__init__.py").write_text('"""Text."""')
    (tmp_path / "rftdask/storage").mkdir()
    (tmp_path / "rftdask/storage/base.py").touch()
    assert folder_problems(tmp_path / "rftdask") == [
        "buffer/ has no __init__.py with a docstring",
        "storage/ has no __init__.py with a docstring",
        "trainer/ has 16 entries, more than 15",
    ]


CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {name: [Requirement(text) for text in texts] for name, texts in PROJECT["optional-dependencies"].items()}
UNPINNED_EXTRAS = {"gpu", "gpu-cu12", "vllm"}
"""Extras whose wheels only machines with a GPU install; constraints.txt explains why it leaves them out."""
UNPINNED = {"mcp"}
"""Packages that mutually exclusive extras need in different versions, which constraints.txt lists."""
OFFERED_BY = {"mlflow": "mlflow-skinny", "pynvml": "nvidia-ml-py"}
"""Import name -> distribution, where the names differ and the distribution may be absent."""
PEERS = {"openrlhf", "trinity", "verl"}
"""Packages that only rftdask.testing.conformance imports, to compare our losses with theirs. Their required versions
exclude each other and ours, so no extra can install them; tests/conformance/install_peers.sh does."""


def read_pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins.items()}


def test_imported_packages_are_declared_dependencies():
    declared = {canonicalize_name(wanted.name) for wanted in [*CORE, *(w for extra in EXTRAS.values() for w in extra)]}
    distributions = packages_distributions()
    undeclared = {}
    for module, tree in read_modules(ROOT / "rftdask").items():
        for source, _ in imported_names(module, False, tree):
            name = source.partition(".")[0]
            if name in PEERS and module.startswith("rftdask.testing.conformance."):
                continue
            offers = {canonicalize_name(offer) for offer in distributions.get(name, [OFFERED_BY.get(name, name)])}
            if name not in {"", "rftdask", *sys.stdlib_module_names} and not offers & declared:
                undeclared[name] = module
    assert undeclared == {}


@pytest.mark.parametrize("extra", ["", *sorted(EXTRAS.keys() - UNPINNED_EXTRAS)])
def test_every_dependency_has_a_pin_that_satisfies_it(extra):
    pins = read_pins()
    wanted = [each for each in (EXTRAS[extra] if extra else CORE) if each.name not in {"rftdask", *UNPINNED}]
    assert not any("+" in pin for pin in pins.values()), "a local build"
    unmet = {str(each): pins.get(canonicalize_name(each.name)) for each in wanted}
    assert {text: pin for text, pin in unmet.items() if pin is None or pin not in Requirement(text).specifier} == {}


@pytest.mark.parametrize(
    ("file", "extras"), [("environment.yml", "dev,notebook"), ("environment-gpu.yml", "gpu,vllm,lora,slurm,sql")]
)
def test_the_conda_environments_are_the_constrained_set(file, extras):
    environment = yaml.safe_load((ROOT / file).read_text())
    *conda, pip = environment["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert pip == {"pip": ["-c constraints.txt", f"-e .[{extras}]"]}
    assert "3.11" in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert environment["name"] == file.replace("environment", PROJECT["name"]).removesuffix(".yml")
    assert set(extras.split(",")) <= EXTRAS.keys()


def test_base_dependencies_are_light_and_unpinned():
    assert {wanted.name for wanted in CORE} & {"torch", "transformers", "datasets", "tensorboard"} == set()
    assert [str(wanted) for wanted in CORE if "==" in str(wanted)] == []
    exact = {wanted.name for name in ("gpu", "gpu-cu12") for wanted in EXTRAS[name] if "==" in str(wanted)}
    assert exact == {"dask", "distributed", "dask-cuda"}


@pytest.mark.parametrize(
    ("package", "extra", "versions"),
    [("torch", "train", ("2.11.0", "2.12.1", "2.13.0")), ("vllm", "vllm", ("0.26.0", "0.32.0"))],
)
def test_the_versions_that_are_promised_are_in_range(package, extra, versions):
    (wanted,) = [each for each in EXTRAS[extra] if each.name == package]
    assert [version for version in versions if version not in wanted.specifier] == []
