"""An engine that does not begin with the adapter of the configuration, as engines did once."""

from collections.abc import Sequence
from pathlib import Path

from rftdask.engines.transformers import TransformersEngine


class BareEngine(TransformersEngine):
    """Serves the model folder without its adapter until the first publication."""

    engine_type = ""

    def load_weights(self, version: int, files: Sequence[Path]) -> None:
        if version > 0:
            super().load_weights(version, files)
