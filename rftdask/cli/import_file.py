"""Import: a configuration made of a script of TRL, or of a file of verl or Trinity-RFT."""

from __future__ import annotations

from rftdask.compat.imported import Imported
from rftdask.compat.trl import read_trl
from rftdask.compat.verl import read_verl
from rftdask.config import load_config
from rftdask.errors import ConfigError, UserError


def import_from(system: str, path: str) -> tuple[str, list[str]]:
    """(YAML, a line for each thing that is not in it). Raises: UserError: no such system; DataError: no such file."""
    if system == "trinity":
        # It has the vocabulary of this package, so its files are read as they are (docs/from-trinity.md).
        config = load_config(path, origin="trinity")
        found = Imported("trinity", {}, left=dict(line.partition(": ")[::2] for line in config.warnings))
        found.tree = config.to_dict()
        return found.to_yaml(), list(config.warnings)
    readers = {"trl": read_trl, "verl": read_verl}
    if system not in readers:
        raise UserError(f"import {system}: it is trl, verl or trinity")
    found = readers[system](path)
    try:
        load_config(found.tree)
    except ConfigError as error:
        # Values that they take and we do not: the file is written all the same, to be mended where it says so.
        found.left.update(("(to be mended) " + key, why) for key, _, why in (p.partition(": ") for p in error.problems))
    return found.to_yaml(), [f"{key}: {why}" for key, why in found.left.items()]
