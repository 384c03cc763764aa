"""External engine: a model behind an OpenAI-compatible API, which is evaluated and never trained.

It works on text, so there is no engine process and no `Engine`; `rollouts/policy/remote_model.py` calls the service.
"""

from __future__ import annotations

from rftdask.config.schema.explorer import EngineTraits


class ExternalEngine(EngineTraits):
    """Traits only; never instantiated."""

    engine_type = "external"
    is_external = True
