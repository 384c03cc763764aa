"""Section `explorer`: the engines that sample, and the limits of a rollout."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rftdask.config.base import (
    NAME,
    Aliases,
    Computed,
    Count,
    Later,
    Natural,
    OpenDict,
    PluginName,
    Seconds,
    Section,
    absent,
    empty_dict,
)
from rftdask.config.plugins import RegisteredPart, lookup_part, read_parts
from rftdask.config.schema.model import ModelConfig
from rftdask.errors import UserError

registered_engines = partial(read_parts, "rftdask.engines", "engine_type")
"""Call for engine_type -> class, of the engines of this package; read from their source: they load torch and vLLM."""


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
    """Name in a configuration. A class without one is named as `package.module.Name`."""
    is_external: ClassVar[bool] = False
    """The model runs elsewhere and speaks text: no tokens or logprobs to train on, no weights to load."""
    has_model: ClassVar[bool] = True
    """It computes with a model's weights. False: no model folder and no tokenizer are needed, and nothing that it
    loads can be verified."""
    is_hosted: ClassVar[bool] = False
    """A service computes with the model: its tokenizer is here, but neither its weights nor a GPU for them."""
    repeats_bits: ClassVar[bool] = False
    """The same requests given at once give the same bits each time."""
    loads_in_flight: ClassVar[bool] = False
    """It may load weights while requests are under way, whose generations tell the oldest and the newest, or
    which token is of which (`Generation.sampled_by`)."""
    guides_sampling: ClassVar[bool] = False
    """It samples by `SamplingParams.grammar` and `bad_tokens`."""
    loads_adapters_in_flight: ClassVar[bool] = True
    """The same of adapters; of an engine that may load weights so."""
    records_experts: ClassVar[bool] = False
    """It can tell which experts of a mixture of experts its tokens took."""
    reads_images: ClassVar[bool] = False
    """It generates from prompts with images, if its model reads any."""
    reads_videos: ClassVar[bool] = False
    """The same of videos."""
    image_models: ClassVar[tuple[str, ...]] = ()
    """Types of models (`model_type`) of whose images it computes what the trainer does, as was seen; (): of any."""
    leaves_device: ClassVar[bool] = False
    """Its `leave_device` frees the memory of its GPUs, so that a trainer and it can take turns on them."""
    spans_nodes: ClassVar[bool] = False
    """Its tensor and pipeline parallel parts may be on several nodes of a job (engines/vllm_follower.py)."""
    takes_dora: ClassVar[bool] = True
    """It serves adapters that were trained with DoRA."""
    required_package: ClassVar[str | None] = None
    """Optional package that it imports; the extra of rftdask that installs it has the same name."""
    config_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of its section that it follows, of those that not every engine follows."""
    takes_share: ClassVar[bool] = False
    """It takes its share of a GPU (`gpu_memory_utilization`) as it starts, by the memory that it finds free: another
    that does so waits until it is ready, and the shares of one GPU are 1 together at most."""
    refused_args: ClassVar[Mapping[str, str]] = {}
    """Names in extra_engine_args that are refused, as it is built on them, and why."""
    refused_policy_args: ClassVar[Mapping[str, str]] = {}
    """The same for the policy alone, whose tokens and logprobs they would change."""
    memory_keys: ClassVar[str] = (
        "explorer.tasks_per_batch, algorithm.repeat_times or model.max_response_tokens lower, or "
        "explorer.rollout_model.engine_type: vllm"
    )
    """What to change where its GPU's memory is out, as it ends a sentence."""
    imports_ahead: ClassVar[tuple[str, ...]] = ()
    """Modules that an engine's process may have imported before its environment is known. None: it imports itself."""


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
    """transformers: PyTorch on CPU or one GPU. vllm: continuous batches on one or several GPUs, or on a CPU; needs the
    extra `vllm`. external: a model behind an OpenAI-compatible API, whose address and key are in the environment
    variables that model.external_model names. tinker: a model at the Tinker service, the policy's with `model.tinker`;
    needs the extra `tinker`. fake: random tokens, for tests. package.module.Name: an engine of your own, a subclass of
    rftdask.engines.base.Engine."""
    engine_num: Annotated[Natural, Computed("1; auxiliary_models: 0")] = absent()
    """Engines, each a Dask worker of its own, with as many GPUs as it works on. auxiliary_models: 0 loads the model
    beside the policy in each explorer worker, on its GPUs; with more, all explorers of the run share these."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights, in which the trainer publishes them, too. auto: float32 on CPU, bfloat16 on GPU."""
    seed: Annotated[int, Computed("seed")] = absent()
    """Seed of the sampling; every rollout gets its own stream from it."""
    model_path: str | None = None
    """auxiliary_models: folder in the Hugging Face layout, or a name on the Hub; a teacher has the vocabulary of the
    policy. Of engine external: the model's name at the service."""
    name: str | None = None
    """auxiliary_models: what workflows call it: model.auxiliary(name). None: its model_path."""
    teacher_for: tuple[str, ...] | None = None
    """auxiliary_models, of several teachers: names of the tasksets and of the dataset whose rows it scores. None: of
    those of no other teacher."""
    temperature: float | None = Field(default=None, ge=0)
    """auxiliary_models: how it samples where workflows ask it. None, here and below: as section `model` says."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """auxiliary_models: likeliest tokens that it samples among; 1 is all."""
    top_k: int | None = Field(default=None, ge=-1)
    """auxiliary_models: the same by their number; -1 is all."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """auxiliary_models: divides the logits of tokens seen before; 1 is none."""
    enable_thinking: bool | None = None
    """auxiliary_models: as `model.enable_thinking`, for its own chat template."""
    min_response_tokens: Natural | None = None
    """auxiliary_models: no end of sequence is sampled before this many tokens."""
    max_response_tokens: Count | None = None
    """auxiliary_models: longest response."""
    max_prompt_tokens: Count | None = None
    """auxiliary_models: longest prompt. None: what its own max_model_len leaves, else as section `model` says."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """auxiliary_models: prompt and response together, by which vLLM sizes its cache. None: as long as the model and its
    cache allow."""
    requests_per_minute: Count | None = None
    """external: requests within any minute at most, of all explorer workers of the run together; each has an equal
    share. Tries again count. None: no limit of ours."""
    tokens_per_minute: Count | None = None
    """external: the same of tokens of prompts and answers; an answer counts as its longest until it is there."""
    max_retries: Natural = 8
    """external: further tries of a request that the service was too busy for (408, 409, 429, 5xx, lost connections),
    after the pause that it asks for, else a growing one."""
    prompt_price: float | None = Field(default=None, ge=0)
    """auxiliary_models: what a million tokens of prompts cost, in any currency; metrics and the summary of the run have
    the sum. None: nothing, or it is not counted."""
    response_price: float | None = Field(default=None, ge=0)
    """auxiliary_models: the same of answers."""
    tool_call_parser: ToolCallParser | None = None
    """How the model writes calls of tools, for workflows that ask by `model.openai_client()`. hermes: JSON within
    <tool_call>. openai: gpt-oss's channels. template: as the tokenizer's response_template says. none: calls stay text.
    The others are vLLM's and need it. None: what the model's chat template shows, else hermes."""
    reasoning_parser: ReasoningParser | None = None
    """How the model tells thoughts from its answer, for the same workflows. think, deepseek_r1, deepseek_v3,
    qwen3: they end with </think>. openai_gptoss, template, none: as above. The others are vLLM's. None: what the chat
    template shows, else none."""
    tensor_parallel_size: Count = 1
    """vLLM: GPUs of one engine, splitting each layer."""
    data_parallel_size: Count = 1
    """vLLM: copies inside one engine, each with GPUs of its own."""
    pipeline_parallel_size: Count = 1
    """vLLM: GPUs of one engine, splitting the stack of layers."""
    enable_expert_parallel: bool = False
    """vLLM: split the experts over the GPUs."""
    extra_engine_args: OpenDict = empty_dict()
    """vLLM: further arguments of its AsyncEngineArgs; they win over those that follow from other keys."""
    enforce_eager: bool = False
    """vLLM: no CUDA graphs; on a CPU there are none."""
    enable_prefix_caching: bool = True
    """vLLM: reuse the attention cache of equal prefixes, within one policy version."""
    enable_chunked_prefill: bool = True
    """vLLM: split long prompts."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """vLLM: share of the GPU's memory. Engines of one explorer worker share its GPUs, and 1 is all of them."""

    def dtype_on(self, device: str) -> str:
        """The data type of the weights on "cpu" or "cuda"."""
        if self.dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.dtype

    @property
    def traits(self) -> type[EngineTraits]:
        """What holds for every engine of this type. Raises: UserError: an engine of the user's own is not found."""
        part = lookup_part("engine", self.engine_type, registered_engines())
        # A class made of the traits alone: the engine's own would import torch.
        if isinstance(part, RegisteredPart):
            return type(part.attribute, (EngineTraits,), dict(part.traits))
        if not (isinstance(part, type) and issubclass(part, EngineTraits)):
            raise UserError(f"engine {self.engine_type!r} is no class of engines; see docs/extending.md")
        return part

    def own_model(self, model: ModelConfig) -> ModelConfig:
        """The lengths and sampling of an auxiliary model: its own, else the policy's `model`."""
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
        """What workflows call an auxiliary model."""
        return self.name or self.model_path or ""

    @property
    def is_apart(self) -> bool:
        """Whether an auxiliary model has workers of its own, unless it is a teacher."""
        return self.engine_num > 0 and not self.traits.is_external

    @property
    def num_gpus(self) -> int:
        """GPUs that one engine works on, where there are any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class OverRolloutConfig(Section):
    """`explorer.over_rollout`: do not wait for the slowest tasks."""

    ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the tasks of a work unit that may be missing; 0 waits for all."""
    wait_after_min: float = Field(default=30.0, ge=0)
    """Seconds that the rest have once enough are done; then they are called off, and end as timeouts."""
    return_partial_tasks: bool = False
    """Keep the finished rollouts of tasks of which others were called off; else they are set aside."""


class DynamicTimeoutConfig(Section):
    """`explorer.dynamic_timeout`: a time limit that follows the mean."""

    enable: bool = False
    """Use it."""
    warmup_min_steps: Natural = 1
    """Explore steps that a worker takes before it begins."""
    ratio: float = Field(default=3.0, gt=0)
    """Limit of an attempt as a multiple of the mean time of the worker's tasks; never above max_timeout."""


class SandboxConfig(Section):
    """`explorer.sandbox`: processes in which workflows and rewards from elsewhere run, so that one that hangs, dies or
    eats memory costs its own rollout only."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: what is not this package's own and not declared in_process. never: all on one event loop, for debugging."""
    max_processes: Count = 128
    """Of one explorer worker at the same time; further rollouts wait their turn."""
    max_memory_gb: float | None = Field(default=4.0, gt=0)
    """Memory of one rollout with all it starts, beyond what the imports take. None: no limit."""
    bubblewrap: bool = False
    """Run sandboxes under `bwrap`: they see the machine read-only, an empty /tmp, only their own processes and no
    network; each rollout begins in an empty folder of its own."""
    bubblewrap_network: bool = False
    """Leave them the network."""


class ExplorerConfig(Section):
    """`explorer`: how tasks become experiences."""

    name: str = Field(default="explorer", pattern=NAME)
    """Name in plans and estimates. Commands of mode explore with different names share the work of one run."""
    min_workers: Count | None = None
    """Explorer workers that a run starts with, and never asks for fewer. None: rollout_model.engine_num, or max_workers
    if that is less."""
    max_workers: Count | None = None
    """Explorer workers that a run asks for at most, as long as there are work units for them. None:
    rollout_model.engine_num, or min_workers if that is more."""
    tasks_per_batch: Count | None = None
    """Tasks in one work unit, the unit of work sent to an engine. None: an even share of
    an explore step for each engine there may be, 64 at most."""
    slots_per_engine: Count | Literal["memory"] | None = None
    """Rollouts that an engine has under way at once; others wait. Save in style fixed, those of the next work unit take
    the slots that are left. None: as many as the rollouts of one work unit. memory: as many as its memory of keys and
    values has room for, by the mean length of the worker's last rollouts, and not fewer than that; an engine that does
    not say how much it has, has that many."""
    max_commit_delay_s: float | None = Field(default=0.25, gt=0)
    """Seconds that the finished rollouts of a task wait for the other tasks of their work unit before they are
    committed without them. None: a batch is committed as a whole."""
    max_timeout: Seconds = 1800.0
    """Seconds for one attempt at one rollout."""
    max_retry_times: Natural = 2
    """Further attempts after a failed one."""
    env_vars: dict[Annotated[str, Field(pattern=r"^[^=\x00]+$")], str] = empty_dict()
    """Environment of the explorer's processes. A secret is given as ${oc.env:NAME}, never written down."""
    plugin_dirs: tuple[str, ...] = ()
    """Folders whose modules are imported where rollouts run, for the workflows and rewards they register."""
    sandbox: SandboxConfig = SandboxConfig()
    """Processes for workflows and rewards from elsewhere."""
    rollout_model: InferenceModelConfig = InferenceModelConfig()
    """Engines of the policy."""
    auxiliary_models: tuple[InferenceModelConfig, ...] = ()
    """Models that workflows may ask, such as judges: beside the policy in each explorer worker, on workers of their own
    (`engine_num`), or behind an API. Those of on_policy_distill and jsd are teachers, which the trainer loads."""
    eval_interval: Count = 100
    """Explore steps between evaluations; lowered to a multiple of the explorer's synchronization interval."""
    eval_on_startup: bool = True
    """Evaluate the initial weights."""
    bench_on_latest_checkpoint: bool = False
    """Mode bench: only the newest checkpoint."""
    over_rollout: OverRolloutConfig = OverRolloutConfig()
    """Do not wait for the slowest tasks."""
    dynamic_timeout: DynamicTimeoutConfig = DynamicTimeoutConfig()
    """A time limit that follows the mean."""
    listen_address: str = "127.0.0.1"
    """Mode serve, and `rftdask serve`: address to listen at; who reaches it needs the key."""
    proxy_port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Mode serve, and `rftdask serve`: 0 takes a free one."""

    def engines(self) -> list[tuple[str, InferenceModelConfig]]:
        """(path, section) of the policy's engines and of the auxiliary ones."""
        auxiliary = [(f"explorer.auxiliary_models[{i}]", model) for i, model in enumerate(self.auxiliary_models)]
        return [("explorer.rollout_model", self.rollout_model), *auxiliary]

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that one explorer worker works on, where there are any: as many as its largest engine takes."""
        beside = [model for model in self.auxiliary_models if not model.is_apart]
        return max(engine.num_gpus for engine in (self.rollout_model, *beside))

    def teacher_of(self, name: str) -> int | None:
        """Number of the auxiliary model that teaches a taskset or dataset; None: none does."""
        models = list(enumerate(self.auxiliary_models))
        rest = next((number for number, model in models if model.teacher_for is None), None)
        return next((number for number, model in models if name in (model.teacher_for or ())), rest)

    @property
    def fewest_workers(self) -> int:
        """Explorer workers that a run starts with, and never asks for fewer."""
        usual = self.rollout_model.engine_num
        return self.min_workers or min(usual, self.max_workers or usual)

    @property
    def most_workers(self) -> int:
        """Explorer workers that a run asks for at most."""
        return self.max_workers or max(self.rollout_model.engine_num, self.fewest_workers)
