"""An environment with the fake Data-Juicer beside this file alone, as `rftdask data setup` leaves one."""

import json
import venv
from pathlib import Path


def make_stand_in(folder: Path) -> Path:
    """Make it in a new folder, in a moment and without pip."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "fake.pth").write_text(f"{Path(__file__).parent}\n")
    (folder / "rftdask.json").write_text(json.dumps({"requirements": [], "packages": {"py-data-juicer": "fake"}}))
    return folder
