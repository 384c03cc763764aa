"""The engine that is none of ours: a model behind an OpenAI-compatible API, measured and never trained.

It takes and gives text, so it has no process here and no `Engine`; `rollouts/policy/remote.py` speaks with the service.
"""

from __future__ import annotations

from rftdask.config.schema.explorer import EngineTraits


class ExternalEngine(EngineTraits):
    """Traits alone; nothing makes an instance."""

    engine_type = "external"
    is_external = True
