"""The engine that is none of ours: a model behind an OpenAI-compatible API, measured and never trained.

It takes and gives text, so it has no process here and no `Engine`; see `rollouts/policy/remote_model.py`.
"""

from __future__ import annotations

from rftdask.config.schema.explorer import EngineTraits


class ExternalEngine(EngineTraits):
    """Traits alone; nothing makes an instance."""

    engine_type = "external"
    is_external = True
