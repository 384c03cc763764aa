"""Configuration of a run: YAML in, a checked and immutable `Config` out. Needs neither torch nor Dask."""

from rftdask.config.load import load_config, replace
from rftdask.config.parts import check_plugins
from rftdask.config.plan import make_plan
from rftdask.config.schema.run import Config
from rftdask.config.yaml_source import fill_from_environment, names_environment

__all__ = [
    "Config",
    "check_plugins",
    "fill_from_environment",
    "load_config",
    "make_plan",
    "names_environment",
    "replace",
]
