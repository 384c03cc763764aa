"""Rules that join keys of several sections: which values go together.

Pure: a Config in, messages out. Each rule names the keys it reads; it is left out when one of them is broken. Every
refusal shows its arithmetic.
"""

from collections.abc import Iterator

from rftdask.config.cross_checks import data, rollouts, training
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import Problem

RULES = (*training.RULES, *data.RULES, *rollouts.RULES)


def stages_differ(config: Config) -> Iterator[Problem]:
    """(path, message) of stages that would share a folder. Not in RULES: it is about the stages together."""
    names = [stage.stage_name for stage in config.stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "stages", f"{names.count(name)} stages are named {name!r}; each needs a name of its own"
