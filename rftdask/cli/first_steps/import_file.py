"""`rftdask import`: a configuration translated from a TRL script, or from a file of verl or Trinity-RFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rftdask.cli.common import say
from rftdask.compat.imported import Imported
from rftdask.compat.trl import read_trl
from rftdask.compat.verl import read_verl
from rftdask.config import load_config
from rftdask.errors import ConfigError, UserError


def import_file(
    system: Annotated[str, typer.Argument(metavar="SYSTEM", help="System of the file: trl, verl or trinity")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="TRL script or YAML file; it is not executed")],
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="Output file (default: print)")] = "",
) -> None:
    """Translate a TRL, verl or Trinity-RFT configuration.

    It reads a TRL script or a YAML file, and lists what has no translation.
    """
    text, untranslated = _translate(system, file)
    if not out:
        say(text)
        return
    if Path(out).exists():
        raise UserError(f"{out} already exists; name another file, or remove it")
    Path(out).write_text(text, encoding="utf-8")
    say(f"wrote {out}")
    for line in untranslated:
        say(f"not translated: {line}", err=True)


def _translate(system: str, path: str) -> tuple[str, list[str]]:
    """Return the YAML and a line for each setting that it lacks. Raises: UserError: unknown system; DataError: no such
    file.
    """
    if system == "trinity":
        # The package shares the vocabulary of Trinity-RFT, so it reads these files directly (docs/from-trinity.md).
        config = load_config(path, origin="trinity")
        imported = Imported("trinity", {}, left=dict(line.partition(": ")[::2] for line in config.warnings))
        imported.tree = config.to_dict()
        return imported.to_yaml(), list(config.warnings)
    readers = {"trl": read_trl, "verl": read_verl}
    if system not in readers:
        raise UserError(f"import {system}: unknown system; use trl, verl or trinity")
    imported = readers[system](path)
    try:
        load_config(imported.tree)
    except ConfigError as error:
        # The other system accepts values that this package rejects. The file is still written, for the user to fix.
        problems = (problem.partition(": ") for problem in error.problems)
        imported.left.update(("(to be mended) " + key, why) for key, _, why in problems)
    return imported.to_yaml(), [f"{key}: {why}" for key, why in imported.left.items()]
