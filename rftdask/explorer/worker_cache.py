"""Companions: what a worker process keeps beside the engine of its policy, and gives to one rollout batch at a time.

Nurseries of its sandboxes, engines of auxiliary models, and how long its tasks took. All of it is a cache: a new
worker starts with none of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rftdask.config import Config
from rftdask.config.engine_traits import engine_traits
from rftdask.config.schema.explorer import AuxiliaryModelConfig
from rftdask.data.tokenizer import load_tokenizer
from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.client import EngineClient, EngineSpec
from rftdask.engines.options import engine_options
from rftdask.errors import DataError
from rftdask.models.hub import local_model
from rftdask.rollouts.policy.lockstep_queue import GenerateBatch
from rftdask.rollouts.policy.recording import PromptLimits
from rftdask.rollouts.policy.remote import RemoteSpec
from rftdask.rollouts.policy.streaming_queue import Streaming
from rftdask.rollouts.runner import AuxiliaryEngine
from rftdask.rollouts.sandbox.pool import ForkServer, SandboxOptions, SandboxSpec
from rftdask.rollouts.timeouts import DynamicTimeout

_MAX_FORK_SERVERS = 4
"""Kept for evaluations, whose workflows may be others than those of training; each holds its imports in memory."""
_MAX_STEPS_REMEMBERED = 100
"""Explore steps whose tasks make up the mean time of a task."""


class Companions:
    """`close` is idempotent; so is asking for what is there already."""

    def __init__(self) -> None:
        self._fork_servers: dict[SandboxSpec, ForkServer] = {}
        """Least recently used first."""
        self._engines: dict[EngineSpec, EngineClient] = {}
        self._tokenizers: dict[str, Any] = {}
        self._times_s: dict[int, list[float]] = {}

    def fork_server(self, spec: SandboxSpec) -> ForkServer:
        """A living one of `spec`. Raises: UserError: a plug-in cannot be imported."""
        fork_server = self._fork_servers.pop(spec, None)
        if fork_server is not None and not fork_server.alive():
            fork_server.close()
            fork_server = None
        while len(self._fork_servers) >= _MAX_FORK_SERVERS:
            self._fork_servers.pop(next(iter(self._fork_servers))).close()
        self._fork_servers[spec] = fork_server or ForkServer(spec)
        return self._fork_servers[spec]

    def auxiliary(self, config: Config, threads: int, timeout_s: float) -> dict[str, AuxiliaryEngine]:
        """The auxiliary models of this process by name, loaded. A teacher is the trainer's; those behind an API see
        `remote_auxiliary`. Raises: RoleError, UserError.
        """
        if config.algorithm.needs_teacher:
            return {}
        models = [model for model in config.explorer.auxiliary_models if not model.traits.is_external]
        specs = {_name(model): _engine_spec(model, config, threads) for model in models}
        for spec in list(self._engines):
            if spec not in specs.values() or not self._engines[spec].alive():
                self._engines.pop(spec).close()
        for spec in specs.values():
            self._engines.setdefault(spec, EngineClient(spec))
        for model in models:
            if _name(model) not in self._tokenizers:
                self._tokenizers[_name(model)] = _tokenizer(model, config)
        return {
            name: _auxiliary_engine(self._engines[spec], self._tokenizers[name], config, timeout_s)
            for name, spec in specs.items()
        }

    def timeout_s(self, config: Config, explore_step: int) -> float:
        """The limit of an attempt by `explorer.max_timeout` and `explorer.dynamic_timeout`."""
        rule = DynamicTimeout(**config.explorer.dynamic_timeout.model_dump())
        return rule.timeout_s(config.explorer.max_timeout, self._times_s, explore_step)

    def took(self, explore_step: int, task_times_s: Sequence[float]) -> None:
        """Remember how long the tasks of a step took."""
        self._times_s.setdefault(explore_step, []).extend(task_times_s)
        for step in sorted(self._times_s)[:-_MAX_STEPS_REMEMBERED]:
            del self._times_s[step]

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()
        self._fork_servers = {}
        for engine in self._engines.values():
            engine.close()
        self._engines = {}
        self._tokenizers = {}
        self._times_s = {}


def external_policy(config: Config) -> RemoteSpec | None:
    """The model behind an API that is evaluated in place of the policy, if there is one."""
    if not config.is_external:
        return None
    return _remote_spec(config.model.external_model.model_name or "", config)


def remote_auxiliary(config: Config) -> dict[str, RemoteSpec]:
    """Auxiliary models behind an API, by name."""
    models = config.explorer.auxiliary_models
    return {_name(m): _remote_spec(m.model_path or "", config) for m in models if m.traits.is_external}


def _remote_spec(model_name: str, config: Config) -> RemoteSpec:
    service = config.model.external_model
    # A try that takes as long as an attempt at a rollout would leave no time for another.
    timeout_s = min(RemoteSpec.timeout_s, config.explorer.max_timeout / 2)
    return RemoteSpec(model_name, service.base_url_env, service.api_key_env, timeout_s)


def auxiliary_sampling(config: Config) -> SamplingParams:
    """How auxiliary models sample, unless a workflow says otherwise."""
    return SamplingParams(max_tokens=config.model.max_response_tokens, temperature=config.model.temperature)


def sandbox_options(config: Config) -> SandboxOptions:
    """What `explorer.sandbox` and `explorer.plugin_dirs` say."""
    sandbox = config.explorer.sandbox
    memory = sandbox.max_memory_gb
    return SandboxOptions(
        mode=sandbox.mode,
        max_sandboxes=sandbox.max_processes,
        max_memory_bytes=None if memory is None else int(memory * 2**30),
        plugin_dirs=config.explorer.plugin_dirs,
        env=tuple(sorted(config.explorer.env_vars.items())),
    )


def _name(model: AuxiliaryModelConfig) -> str:
    return model.name or model.model_path or ""


def _engine_spec(model: AuxiliaryModelConfig, config: Config, threads: int) -> EngineSpec:
    options = engine_options(model, config, policy=False)
    env = tuple(sorted(config.explorer.env_vars.items()))
    return EngineSpec(model.engine_type, model.model_path or "", options, threads, None, env)


def generates_as(config: Config, client: EngineClient, timeout_s: float) -> GenerateBatch | Streaming:
    """How rollouts ask the engine: as they come, but where runs are to be the same bit by bit in calls, of which the
    queue decides what shares one; see its text. An engine that never repeats its bits is not asked in
    calls. timeout_s: for a call, or without an answer.
    """
    if config.synchronizer.sync_style != "fixed" or not engine_traits(client.spec.engine_type).repeats_bits:
        return Streaming(client.submit, timeout_s, str(client))

    async def generate(requests: list[GenerateRequest]) -> list[Generation]:
        return await asyncio.to_thread(client.generate, requests, timeout_s)

    return generate


def _auxiliary_engine(client: EngineClient, tokenizer: Any, config: Config, timeout_s: float) -> AuxiliaryEngine:
    client.wait_ready()

    async def logprobs(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[float, ...]]:
        return await asyncio.to_thread(client.logprobs, pairs, timeout_s)

    limits = PromptLimits(config.model.max_prompt_tokens, config.model.enable_prompt_truncation)
    generate = generates_as(config, client, timeout_s)
    return AuxiliaryEngine(generate, tokenizer, auxiliary_sampling(config), limits, logprobs)


def _tokenizer(model: AuxiliaryModelConfig, config: Config) -> Any:
    if not model.traits.has_model:
        return load_tokenizer(config)
    # Late: importing transformers takes most of a second.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            local_model(model.model_path), trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"explorer.auxiliary_models: {model.model_path!r} gives no tokenizer: {reason}") from error
