"""The shape of the project. Promises:

- imports point one way: a module imports from lower layers and from its own package, and no modules form a cycle;
- `import rftdask`, its config and its storage load neither torch nor transformers nor vLLM;
- a trainer rank that is a fake, and whoever checks an algorithm, load torch but not its compiler, which takes seconds;
- every folder of the package says what it holds, and none below the top has more than 15 entries;
- what the package imports is declared, what is declared is pinned, and the pins satisfy what is declared;
- environment.yml asks for what pyproject.toml and constraints.txt say.

The two import rules are functions of a folder, so small invented packages show below that they can fail.
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

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]

LAYERS = (
    {"errors", "text"},
    {"config.plugins"},  # the one rule of plug-ins, below all that has parts
    {"config", "storage", "processes", "models"},
    {"algorithm", "data", "models.lora", "models.model_shape", "monitor", "weights"},
    {"buffer", "synchronizer"},
    {"run.run_folder", "run.sources", "engines"},
    {"rollouts", "run.made_of"},
    {"compat", "explorer", "run.view", "trainer"},
    {"cluster", "provenance", "run.preflight", "run.summary", "testing"},
