"""Verified loading: an engine loads a version and shows that it serves it, or ends.

Engines fail to load without saying so: vLLM 0.32 on a CPU, for one, kept the old output head of models whose embeddings
are tied. Invariant: after `load_verified` the engine computes what the trainer computed with these weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rftdask.engines.base import Engine
from rftdask.errors import WeightsError
from rftdask.weights.fingerprint import Fingerprint

log = logging.getLogger(__name__)


def load_verified(engine: Engine, version: int, files: Sequence[Path], fingerprint: Fingerprint | None) -> None:
    """Load the weights, compare with `fingerprint`, and if they differ load once more in the surest way the engine has.

    Args: fingerprint: None: nobody made one (a fake trainer), so nothing is compared.
    Raises: WeightsError: the engine computes something else after both; RoleError: it cannot load. It must not be used
        again after either.
    """
    engine.load_weights(version, files)
    if fingerprint is None or not engine.has_model:
        return
    problem = fingerprint.problem(engine.logprobs(fingerprint.pairs), engine.dtype)
    if not problem:
        return
    log.warning("version %d does not compute as it did in the trainer, it is loaded anew: %s", version, problem)
    engine.load_anew(version, files)
    problem = fingerprint.problem(engine.logprobs(fingerprint.pairs), engine.dtype)
    if problem:
        raise WeightsError(
            f"{engine} does not compute what the trainer computed with version {version}, also after loading it anew: "
            f"{problem}. Its rollouts would be another policy's; is the model's code the same on both sides?"
        )
