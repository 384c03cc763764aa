"""Options: what of the configuration an engine is made with. Pure; it imports no engine."""

from __future__ import annotations

import json
from typing import Any

from rftdask.config import Config
from rftdask.config.base import plain
from rftdask.config.schema.explorer import InferenceModelConfig
from rftdask.weights.fingerprint import SEQUENCE_LENGTH


def engine_options(
    section: InferenceModelConfig, config: Config, *, policy: bool = True
) -> tuple[tuple[str, Any], ...]:
    """Keyword arguments of the engine's class, hashable and sorted. policy: False: a frozen model beside it."""
    if not section.traits.has_model:
        return ()
    options: dict[str, Any] = {"dtype": section.dtype, "trust_remote_code": config.model.trust_remote_code}
    followed = section.traits.config_keys
    if followed:
        more = {key: getattr(section, key) for key in followed if key != "extra_engine_args"}
        more |= plain(section.extra_engine_args)
        options["engine_args"] = json.dumps(more, sort_keys=True)
        if policy:
            # Room for the proof of weights: its sequences, and the one token that vLLM must sample after each.
            options["max_model_len"] = max(config.model.max_model_len, SEQUENCE_LENGTH + 1)
            if config.model.lora_configs:
                options["lora_rank"] = config.model.lora_configs[0].lora_rank
    return tuple(sorted(options.items()))
