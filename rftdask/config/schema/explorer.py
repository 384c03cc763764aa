"""Section `explorer`: engines that sample, and limits of a rollout."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rftdask.config.base import (
    NAME,
    Aliases,
    Computed,
    Count,
    Later,
    MayChange,
    Natural,
    OpenDict,
    PluginName,
    Problem,
    Seconds,
    Section,
    Seed,
    absent,
    empty_dict,
    reading,
    show,
)
from rftdask.config.plugins import RegisteredPart, lookup_part, read_parts
from rftdask.config.schema.model import ModelConfig
from rftdask.errors import UserError

registered_engines = partial(read_parts, "rftdask.engines", "engine_type")
"""Returns engine_type -> class, of this package's engines, read from their source because they load torch and vLLM."""


# fmt: off
ToolCallParser = Literal[
    "hermes", "none", "template", "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47", "granite",
    "granite-20b-fc", "granite4", "hf", "hunyuan_a13b", "hy_v3", "inkling", "internlm", "jamba", "kimi_k2", "kimi_k3",
    "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minicpm5", "minimax_m2",
    "minimax_m3", "mistral", "olmo3", "openai", "phi4_mini_json", "poolside_v1", "pythonic", "qwen3_coder",
    "qwen3_json", "qwen3_xml", "seed_oss", "solar_open2", "step3", "step3p5", "xlam",
]
ReasoningParser = Literal[
    "think", "deepseek_r1", "qwen3", "none", "template", "cohere_command3", "cohere_command4", "deepseek_v3",
    "deepseek_v4", "ernie45", "gemma4", "glm45", "glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3", "inkling",
    "kimi_k2", "kimi_k3", "mimo", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral", "nemotron_v3",
    "olmo3", "openai_gptoss", "poolside_v1", "seed_oss", "solar_open2", "step3", "step3p5",
]
# fmt: on


class EngineTraits:
    """Base of `rftdask.engines.base.Engine`. All values are literals.

    Example:
        class VllmEngine(Engine):
            engine_type = "vllm"
            required_package = "vllm"
    """

    engine_type: ClassVar[str] = ""
    """Name in a configuration. Classes without one are named as `package.module.Name`."""
    is_external: ClassVar[bool] = False
    """The model runs elsewhere and returns text: no tokens or logprobs to train on, no weights to load."""
    has_model: ClassVar[bool] = True
    """The engine computes with a model's weights. False: no model folder and no tokenizer are needed, and loaded
    weights cannot be verified."""
    is_hosted: ClassVar[bool] = False
    """A service runs the model: the tokenizer is local, but neither weights nor a GPU are."""
    repeats_bits: ClassVar[bool] = False
    """Equal requests submitted together give equal bits every time."""
    loads_in_flight: ClassVar[bool] = False
    """The engine can load weights during requests. Their generations report the oldest and newest version, or the
    version of each token (`Generation.sampled_by`)."""
    guides_sampling: ClassVar[bool] = False
    """The engine follows `SamplingParams.grammar` and `bad_tokens`."""
    loads_adapters_in_flight: ClassVar[bool] = True
    """The same for adapters, if `loads_in_flight`."""
    records_experts: ClassVar[bool] = False
    """The engine can report the experts of each token in a mixture of experts."""
    reads_images: ClassVar[bool] = False
    """The engine accepts prompts with images, if its model does."""
    reads_videos: ClassVar[bool] = False
    """The engine accepts prompts with videos, if its model does."""
    image_models: ClassVar[tuple[str, ...]] = ()
    """Model types (`model_type`) for whose images engine and trainer were verified to agree. (): any."""
    leaves_device: ClassVar[bool] = False
    """`leave_device` frees the memory of its GPUs, so that engine and trainer can use them alternately."""
    spans_nodes: ClassVar[bool] = False
    """Tensor and pipeline parallel ranks may run on several nodes of a job (engines/vllm_follower.py)."""
    takes_dora: ClassVar[bool] = True
    """The engine serves adapters trained with DoRA."""
    max_lora_rank: ClassVar[int | None] = None
    """Largest rank of an adapter that the engine serves. None: any."""
    required_package: ClassVar[str | None] = None
    """Optional package that the engine imports. The extra of rftdask that installs it has the same name. None: no
    package."""
    config_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the engine's section that this engine follows and others may not."""
    takes_share: ClassVar[bool] = False
    """The engine reserves its share of a GPU (`gpu_memory_utilization`) at start, from the memory that is free then.
    Other such engines wait until it is ready, and the shares on one GPU add up to 1 at most."""
    refused_args: ClassVar[Mapping[str, str]] = {}
    """Names in extra_engine_args that are refused because the engine depends on them, each with the reason."""
    refused_policy_args: ClassVar[Mapping[str, str]] = {}
    """The same for the policy only, whose tokens and logprobs they would change."""
    memory_keys: ClassVar[str] = (
        "explorer.tasks_per_batch, algorithm.repeat_times or model.max_response_tokens lower, or "
        "explorer.rollout_model.engine_type: vllm"
    )
    """Settings to change if its GPU runs out of memory, as the end of a sentence."""
    imports_ahead: ClassVar[tuple[str, ...]] = ()
    """Modules that the engine's process may import before its environment is known. (): none."""


_REFUSED = (
    *("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
    "extra_engine_args",
)
"""Keys that change the results of an engine: an error if it does not follow them."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "repetition_penalty", "enable_thinking"),
    *("min_response_tokens", "max_response_tokens", "max_prompt_tokens", "max_model_len"),
)
"""Lengths and sampling of an auxiliary model."""


class InferenceModelConfig(Section):
    """`explorer.rollout_model`, or an item of `explorer.auxiliary_models`: engines that generate text."""

    engine_type: Annotated[
        str,
        PluginName("engine", registered_engines, needed=True),
        Aliases(
            {"vllm_async": "vllm", "openai": "external"},
            "vLLM's asynchronous engine is the only one there is, and a model behind an API is external to a run",
        ),
        Later("this engine", ("sglang",)),
    ] = "transformers"
    """transformers: PyTorch on CPU or one GPU. vllm: continuous batching on one or several GPUs, or on a CPU; needs the
    extra `vllm`. external: a model behind an OpenAI-compatible API, whose address and key are in the environment
    variables named by model.external_model. tinker: a model at the Tinker service, for the policy with `model.tinker`;
    needs the extra `tinker`. fake: random tokens, for tests. package.module.Name: your own subclass of
    rftdask.engines.base.Engine."""
    engine_num: Annotated[Natural, Computed("1; auxiliary_models: 0"), MayChange()] = absent()
    """Number of engines, each a Dask worker with the GPUs it needs. auxiliary_models: 0 loads the model with the policy
    in each explorer worker, on its GPUs; with more, all explorers of the run share the engines."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights, in which the trainer also publishes them. auto: float32 on CPU, bfloat16 on GPU."""
    seed: Annotated[Seed, Computed("seed")] = absent()
    """Sampling seed; every rollout gets its own stream from it."""
    model_path: str | None = None
    """auxiliary_models: folder in the Hugging Face layout, or a name on the Hub. A teacher must have the policy's
    vocabulary. Engine external: the model's name at the service."""
    name: str | None = None
    """auxiliary_models: name for workflows: model.auxiliary(name). None: its model_path."""
    teacher_for: tuple[str, ...] | None = None
    """auxiliary_models, with several teachers: tasksets and dataset whose rows this teacher scores. None: those without
    another teacher."""
    temperature: float | None = Field(default=None, ge=0)
    """auxiliary_models: sampling temperature of workflows' requests. None, here and below: the value in section
    `model`."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """auxiliary_models: sample among the most likely tokens with this total probability. 1: all."""
    top_k: int | None = Field(default=None, ge=-1)
    """auxiliary_models: sample among this many most likely tokens. -1: all."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """auxiliary_models: divisor of the logits of tokens seen before. 1: none."""
    enable_thinking: bool | None = None
    """auxiliary_models: as `model.enable_thinking`, for its own chat template."""
    min_response_tokens: Natural | None = None
    """auxiliary_models: minimum response length in tokens."""
    max_response_tokens: Count | None = None
    """auxiliary_models: maximum response length in tokens."""
    max_prompt_tokens: Count | None = None
    """auxiliary_models: maximum prompt length in tokens. None: what its max_model_len leaves, else the value in section
    `model`."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """auxiliary_models: maximum length of prompt and response together, which sets the size of vLLM's cache. None: as
    long as model and cache allow."""
    requests_per_minute: Annotated[Count | None, MayChange()] = None
    """external: maximum requests in any minute, of all explorer workers of the run; each worker gets an equal share.
    Retries count. None: no limit here."""
    tokens_per_minute: Annotated[Count | None, MayChange()] = None
    """external: maximum tokens of prompts and answers in any minute. An answer counts as its maximum until it arrives.
    None: no limit here."""
    max_retries: Annotated[Natural, MayChange()] = 8
    """external: retries of a request that failed because the service was busy (408, 409, 429, 5xx, lost connections),
    after the pause that it requests, else after growing pauses."""
    prompt_price: Annotated[float | None, MayChange()] = Field(default=None, ge=0)
    """auxiliary_models: price of a million prompt tokens, in any currency; metrics and summary report the sum. None:
    not counted."""
    response_price: Annotated[float | None, MayChange()] = Field(default=None, ge=0)
    """auxiliary_models: price of a million response tokens. None: not counted."""
    tool_call_parser: ToolCallParser | None = None
    """Format of the model's tool calls, for workflows that use `model.openai_client()`. hermes: JSON in <tool_call>.
    openai: channels of gpt-oss. template: the tokenizer's response_template. none: calls stay text. The others are
    vLLM's and need it. None: detected from the model's chat template, else hermes."""
    reasoning_parser: ReasoningParser | None = None
    """Format of the model's thoughts, for the same workflows. think, deepseek_r1, deepseek_v3, qwen3: they end with
    </think>. openai_gptoss, template, none: as for tool_call_parser. The others are vLLM's. None: detected from the
    chat template, else none."""
    tensor_parallel_size: Annotated[Count, MayChange()] = 1
    """vLLM: GPUs of one engine, splitting each layer."""
    data_parallel_size: Annotated[Count, MayChange()] = 1
    """vLLM: copies in one engine, each on its own GPUs."""
    pipeline_parallel_size: Annotated[Count, MayChange()] = 1
    """vLLM: GPUs of one engine, splitting the stack of layers."""
    enable_expert_parallel: Annotated[bool, MayChange()] = False
    """vLLM: distribute the experts over the GPUs."""
    extra_engine_args: OpenDict = empty_dict()
    """vLLM: further arguments of AsyncEngineArgs; they override those derived from other keys."""
    enforce_eager: Annotated[bool, MayChange()] = False
    """vLLM: use no CUDA graphs."""
    enable_prefix_caching: Annotated[bool, MayChange()] = True
    """vLLM: reuse the attention cache of equal prefixes within one policy version."""
    enable_chunked_prefill: Annotated[bool, MayChange()] = True
    """vLLM: split long prompts."""
    gpu_memory_utilization: Annotated[float, MayChange()] = Field(default=0.9, gt=0, le=1)
    """vLLM: share of the GPU's memory. Engines of one explorer worker share its GPUs. 1: all memory."""

    @reading("engine_type", *_REFUSED)
    def _engine_supports_its_keys(self) -> Iterator[Problem]:
        for key in self.without_effect(*_REFUSED):
            remedy = f"leave it out or use {' or '.join(engines_that_follow(key))}"
            yield key, f"engine_type {self.engine_type} does not support it; {remedy}"
        refused = self.traits.refused_args
        for key in refused.keys() & self.extra_engine_args.keys():
            yield f"extra_engine_args.{key}", f"{refused[key]}; leave it out"

    def without_effect(self, *keys: str) -> list[str]:
        """Return those of `keys` that differ from their defaults and that the engine does not follow."""
        return [key for key in self.changed(*keys) if key not in self.traits.config_keys]

    def dtype_on(self, device: str) -> str:
        """Return the data type of the weights on "cpu" or "cuda"."""
        if self.dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.dtype

    @property
    def traits(self) -> type[EngineTraits]:
        """Traits of the engine type. Raises: UserError: the user's own engine is not found."""
        part = lookup_part("engine", self.engine_type, registered_engines())
        # A class with only the traits, because the engine's class would import torch.
        if isinstance(part, RegisteredPart):
            return type(part.attribute, (EngineTraits,), dict(part.traits))
        if not (isinstance(part, type) and issubclass(part, EngineTraits)):
            raise UserError(f"engine {self.engine_type!r} is not an engine class; see docs/extending.md")
        return part

    def own_model(self, model: ModelConfig) -> ModelConfig:
        """Return lengths and sampling of an auxiliary model; absent keys come from the policy's `model`."""
        response, longest = self.max_response_tokens or model.max_response_tokens, self.max_model_len
        left = model.max_prompt_tokens if longest is None else max(1, longest - response)
        prompt = self.max_prompt_tokens or left
        if longest is None:
            unchanged = (prompt, response) == (model.max_prompt_tokens, model.max_response_tokens)
            longest = model.max_model_len if unchanged else prompt + response
        changes = {"max_model_len": longest, "max_prompt_tokens": prompt, "max_response_tokens": response}
        keys = ("temperature", "top_p", "top_k", "repetition_penalty", "min_response_tokens")
        own = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        return model.model_copy(update=changes | own)

    @property
    def asked_name(self) -> str:
        """Name of an auxiliary model for workflows."""
        return self.name or self.model_path or ""

    @property
    def is_apart(self) -> bool:
        """True if an auxiliary model has its own workers. Not for teachers."""
        return self.engine_num > 0 and not self.traits.is_external

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine, if the machine has any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


def engines_that_follow(key: str) -> list[str]:
    """Return the engine types of this package that follow a key of `EngineTraits.config_keys`."""
    return [name for name, part in registered_engines().items() if key in part.traits.get("config_keys", ())]


class OverRolloutConfig(Section):
    """`explorer.over_rollout`: do not wait for the slowest tasks."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of a work unit's tasks that may be missing. 0: wait for all."""
    wait_after_min: Annotated[float, MayChange()] = Field(default=30.0, ge=0)
    """Seconds that the remaining tasks get once enough are done; then they are cancelled and count as timeouts."""
    return_partial_tasks: bool = False
    """Keep the finished rollouts of cancelled tasks. False: they are set aside."""


class DynamicTimeoutConfig(Section):
    """`explorer.dynamic_timeout`: a time limit derived from the mean duration."""

    enable: bool = False
    """Use the dynamic limit."""
    warmup_min_steps: Natural = 1
    """Explore steps of a worker before the limit applies."""
    ratio: float = Field(default=3.0, gt=0)
    """Limit of an attempt as a multiple of the worker's mean task duration. Never above max_timeout."""


class SandboxConfig(Section):
    """`explorer.sandbox`: processes for workflows and rewards of the user's, so that one that hangs, dies or exhausts
    memory fails only its own rollout."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: code that is neither this package's nor declared in_process. always: all. never: none; everything runs on
    one event loop, for debugging."""
    max_processes: Count = 128
    """Maximum processes of one explorer worker at the same time. Further rollouts wait."""
    max_memory_gb: float | None = Field(default=4.0, gt=0)
    """GB of memory of one rollout with its child processes, beyond the imports. None: no limit."""
    bubblewrap: bool = False
    """Run sandboxes under `bwrap`: the file system is read-only, /tmp is empty, only their own processes are visible,
    and there is no network. Each rollout starts in an empty folder."""
    bubblewrap_network: bool = False
    """Allow network access under bubblewrap."""


class ExplorerConfig(Section):
    """`explorer`: how tasks become experiences."""

    name: Annotated[str, MayChange()] = Field(default="explorer", pattern=NAME)
    """Name in plans and estimates. Commands in mode explore with different names share the work of one run."""
    min_workers: Annotated[Count | None, MayChange()] = None
    """Explorer workers at the start, and the minimum later. None: rollout_model.engine_num, or max_workers if that is
    less."""
    max_workers: Annotated[Count | None, MayChange()] = None
    """Maximum explorer workers that a run requests while work units wait. None: rollout_model.engine_num, or
    min_workers if that is more."""
    tasks_per_batch: Count | None = None
    """Tasks in one work unit, which is sent to one engine. None: an equal share of an explore step for each possible
    engine, 64 at most."""
    slots_per_engine: Count | Literal["memory"] | None = None
    """Concurrent rollouts of an engine; others wait. Except in style fixed, the next work unit fills free slots. None:
    as many as one work unit has rollouts. memory: as many as its key-value cache holds, by the mean length of the
    worker's last rollouts, but not fewer than with None; engines that do not report their cache size use None."""
    max_commit_delay_s: Annotated[Seconds | None, MayChange()] = 0.25
    """Seconds that finished rollouts of a task wait for the other tasks of their work unit before they are committed in
    a part of their own. None: work units are committed as a whole."""
    max_timeout: Annotated[Seconds, MayChange()] = 1800.0
    """Seconds for one attempt of a rollout."""
    max_retry_times: Annotated[Natural, MayChange()] = 2
    """Further attempts after a failed one."""
    env_vars: Annotated[dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], str], MayChange()] = empty_dict()
    """Environment variables of the explorer's processes. Write a secret as ${oc.env:NAME}; it is never stored."""
    plugin_dirs: tuple[str, ...] = ()
    """Folders whose modules are imported where rollouts run, for the workflows and rewards that they register."""
    sandbox: Annotated[SandboxConfig, MayChange()] = SandboxConfig.model_construct()
    """Processes for workflows and rewards of the user's."""
    rollout_model: InferenceModelConfig = InferenceModelConfig.model_construct()
    """Engines of the policy."""
    auxiliary_models: tuple[InferenceModelConfig, ...] = ()
    """Models that workflows may use, such as judges: with the policy in each explorer worker, on their own workers
    (`engine_num`), or behind an API. For on_policy_distill and jsd they are teachers, which the trainer loads."""
    eval_interval: Annotated[Count, MayChange()] = 100
    """Explore steps between evaluations, rounded down to a multiple of the explorer's synchronization interval."""
    eval_on_startup: Annotated[bool, MayChange()] = True
    """Evaluate the initial weights."""
    bench_on_latest_checkpoint: Annotated[bool, MayChange()] = False
    """Mode bench: evaluate only the newest checkpoint."""
    over_rollout: OverRolloutConfig = OverRolloutConfig.model_construct()
    """Do not wait for the slowest tasks."""
    dynamic_timeout: Annotated[DynamicTimeoutConfig, MayChange()] = DynamicTimeoutConfig.model_construct()
    """Time limit derived from the mean duration."""
    listen_address: Annotated[str, MayChange()] = "127.0.0.1"
    """Mode serve, and `rftdask serve`: address to listen on. Clients need the key."""
    proxy_port: Annotated[int, Field(ge=0, le=65535), MayChange()] = 8000
    """Mode serve, and `rftdask serve`: port to listen on. 0: any free port."""

    @reading("min_workers", "max_workers")
    def _workers_are_between_limits(self) -> Iterator[Problem]:
        fewest, most = self.min_workers, self.max_workers
        if fewest is not None and most is not None and fewest > most:
            yield "min_workers", f"{fewest} exceeds explorer.max_workers {most}; lower one or raise the other"

    @reading("rollout_model")
    def _policy_is_described_elsewhere(self) -> Iterator[Problem]:
        in_model = "lengths and sampling of the policy; set the same key in section model"
        whats = {"model_path": in_model, **dict.fromkeys(_SAMPLING, in_model)}
        of_auxiliary = dict.fromkeys(("name", "teacher_for", "prompt_price", "response_price"), "auxiliary models")
        for key, what in {**whats, **of_auxiliary}.items():
            if (value := getattr(self.rollout_model, key)) is not None:
                missing = f"{show(value)} is not available in this release ({what})"
                yield f"rollout_model.{key}", f"{missing}; leave it out or set null"
        if self.rollout_model.engine_num < 1:
            yield "rollout_model.engine_num", "0: the policy needs at least one engine; give 1 or more"
        refused = self.rollout_model.traits.refused_policy_args
        for key in refused.keys() & self.rollout_model.extra_engine_args.keys():
            yield f"rollout_model.extra_engine_args.{key}", f"{refused[key]}; leave it out"

    @reading("auxiliary_models")
    def _hosted_models_have_no_workers(self) -> Iterator[Problem]:
        for number, model in enumerate(self.auxiliary_models):
            if model.is_apart and model.traits.is_hosted:
                why = "the Tinker service runs the model, so it needs no workers; leave it out"
                yield f"auxiliary_models[{number}].engine_num", why

    def engines(self) -> list[tuple[str, InferenceModelConfig]]:
        """Return (path, section) of the policy's engine and of the auxiliary ones."""
        auxiliary = [(f"explorer.auxiliary_models[{i}]", model) for i, model in enumerate(self.auxiliary_models)]
        return [("explorer.rollout_model", self.rollout_model), *auxiliary]

    @property
    def gpus_per_worker(self) -> int:
        """GPUs of one explorer worker, if the machine has any: as many as its largest engine needs."""
        beside = [model for model in self.auxiliary_models if not model.is_apart]
        return max(engine.num_gpus for engine in (self.rollout_model, *beside))

    def teacher_of(self, name: str) -> int | None:
        """Return the index of the auxiliary model that teaches a taskset or dataset; None: no teacher."""
        models = list(enumerate(self.auxiliary_models))
        rest = next((number for number, model in models if model.teacher_for is None), None)
        return next((number for number, model in models if name in (model.teacher_for or ())), rest)

    @property
    def fewest_workers(self) -> int:
        """Explorer workers at the start of a run, and the minimum later."""
        usual = self.rollout_model.engine_num
        return self.min_workers or min(usual, self.max_workers or usual)

    @property
    def most_workers(self) -> int:
        """Maximum explorer workers that a run requests."""
        return self.max_workers or max(self.rollout_model.engine_num, self.fewest_workers)
