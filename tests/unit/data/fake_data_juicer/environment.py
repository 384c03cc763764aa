"""An environment with only the fake Data-Juicer of this folder, as `rftdask data setup` would make it."""

import json
import venv
from pathlib import Path


def make_stand_in(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "fake.pth").write_text(f"{Path(__file__).parent}\n")
    (folder / "rftdask.json").write_text(json.dumps({"requirements": [], "packages": {"py-data-juicer": "fake"}}))
    return folder
