"""Sections `model` and `cluster`: what is trained, with which lengths and sampling, and on which machines."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rftdask.config.base import (
    Count,
    Derived,
    Filled,
    Free,
    Ignored,
    Later,
    Natural,
    Seconds,
    Section,
    absent,
    no_items,
)


class LoraConfig(Section):
    """One item of `model.lora_configs`."""

    name: str | None = None
    """Name of the adapter."""
    path: str | None = None
    """Folder of a trained adapter to begin with. None: a fresh one."""
    base_model_name: str | None = None
    """Model the adapter was made for."""
    lora_rank: Count = 32
    """Rank of the update."""
    lora_alpha: Count = 32
    """Scale of the update, divided by the rank."""
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the adapter. auto: float32."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Which layers get an adapter."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Which layers get none."""
    use_rslora: bool = False
    """Divide the scale by the square root of the rank, so that large ranks learn as fast as small ones."""
    use_dora: bool = False
    """Train the magnitude of each weight's columns apart from their direction. Slower, sometimes better."""
    is_dummy: Annotated[Any, Derived()] = None
    """Derived."""


class TinkerConfig(Section):
    """`model.tinker`: training through the Tinker service."""

    enable: bool = False
    """Use the service."""
    rank: Count = 16
    """LoRA rank."""
    seed: int | None = None
    """Seed of the adapter's initial weights."""
    train_mlp: bool = True
    """Train the MLP layers."""
    train_attn: bool = True
    """Train the attention layers."""
    train_unembed: bool = True
    """Train the output layer."""
    base_url: str | None = None
    """Address of the service."""


class ExternalModelConfig(Section):
    """`model.external_model`: a model behind an OpenAI-compatible API, for mode bench."""

    enable: bool = False
    """Evaluate it in place of the policy."""
    base_url_env: str = "OPENAI_BASE_URL"
    """Environment variable that holds the address."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""
    model_name: str | None = None
    """Name of the model at the service."""


_VLLM_LORA = Later("this setting of vLLM's adapters; explorer.rollout_model.extra_engine_args takes it")


class ModelConfig(Section):
    """`model`: the policy, its lengths in tokens and its sampling."""

    model_path: str = Field(min_length=1)
    """Folder in the Hugging Face layout, or a name on the Hugging Face Hub. The tokenizer comes from it too."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Off unless you trust its author."""
    critic_model_path: str | None = None
    """Model whose body the critic of ppo begins with. None or empty: `model_path`."""
    custom_chat_template: str | None = None
    """Jinja chat template used in place of the tokenizer's. Wins over `chat_template_path`."""
    chat_template_path: str | None = None
    """File that holds a chat template."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of training rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among this many likeliest tokens; -1 is all."""
    logprobs: Annotated[Natural, Ignored("the log-probability of every sampled token is always recorded")] = 0
    """Log-probabilities of this many alternatives."""
    max_model_len: Annotated[int, Filled("max_prompt_tokens + max_response_tokens")] = absent(ge=2)
    """Longest sequence, prompt and response together. None: the sum of the two limits below."""
    max_prompt_tokens: Annotated[Count, Filled("what max_model_len leaves")] = absent()
    """Longest prompt. None: what `max_model_len` leaves, or half of it."""
    max_response_tokens: Annotated[Count, Filled("what max_model_len leaves")] = absent()
    """Longest response. None: what `max_model_len` leaves, or half of it."""
    min_response_tokens: Natural = 0
    """No end of sequence is sampled before this many tokens."""
    enable_prompt_truncation: bool = True
    """True: a prompt that is too long is cut and its rollout is not trained on. False: its task fails."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the logits of tokens seen before; 1 is none."""
    enable_thinking: Annotated[bool | None, Later("switching the thinking mode of a chat template")] = None
    """Value given to the chat template. None: the template's own default."""
    lora_configs: Annotated[tuple[LoraConfig, ...] | None, Field(max_length=1)] = None
    """The adapter to train in place of all weights, one at most. Needs the extra `lora`."""
    fully_sharded_loras: Annotated[bool, _VLLM_LORA] = False
    """vLLM: shard the adapters fully."""
    max_cpu_loras: Annotated[Count | None, _VLLM_LORA] = None
    """vLLM: adapters kept in host memory."""
    rope_scaling: Annotated[Free | None, Later("changing the rotary embedding")] = None
    """Rotary embedding scaling, as in the model's config.json."""
    rope_theta: Annotated[float | None, Later("changing the rotary embedding")] = None
    """Rotary embedding base."""
    tinker: Annotated[TinkerConfig, Later("the Tinker service")] = TinkerConfig()
    """Training through the Tinker service."""
    external_model: ExternalModelConfig = ExternalModelConfig()
    """A model behind an API, evaluated in mode bench; its environment variables are also those of auxiliary models of
    engine external."""


class JobConfig(Section):
    """`cluster.slurm.<role>`: what each job of a role asks of SLURM."""

    partition: str | None = None
    """Partition. None: the site's default."""
    account: str | None = None
    """Account that pays."""
    gres: str | None = None
    """Generic resources of the job, such as gpu:1."""
    constraint: str | None = None
    """Features that its node must have."""
    walltime: str | None = None
    """Longest time, as SLURM writes it: 04:00:00. None: the partition's default."""
    cpus: Count = 1
    """Cores of the job."""
    memory: str = "4GB"
    """Memory of the job."""
    directives: tuple[str, ...] = ()
    """Further #SBATCH lines, without the #SBATCH."""
    prologue: tuple[str, ...] = ()
    """Lines of shell before the command: modules to load, variables, an environment to activate."""


class SlurmConfig(Section):
    """`cluster.slurm`: the jobs of a run on SLURM."""

    controller: JobConfig = JobConfig()
    """The one job of `rftdask submit`: scheduler, driver and the light roles. It needs no GPU."""
    trainer: JobConfig = JobConfig()
    """A job for each rank of the trainer."""
    explorer: JobConfig = JobConfig()
    """A job for each engine; good for preemptible partitions."""


_OTHER_KINDS = ("moab", "kubernetes", "ssh")


class ClusterConfig(Section):
    """`cluster`: where the Dask workers live. How roles are placed on them follows from the other sections."""

    type: Annotated[
        Literal["local", "local-cuda", "slurm", "pbs", "lsf", "sge", "htcondor", "oar", "joined", "existing"],
        Later("this kind of cluster", _OTHER_KINDS),
    ] = "local"
    """local: processes on this machine. local-cuda: the same, started by dask-cuda (extra gpu). slurm, pbs, lsf, sge,
    htcondor, oar: a job for each worker, through dask-jobqueue (extra slurm). joined: workers that `rftdask join`
    brings. existing: a Dask scheduler that is there already, see `options`."""
    options: Free = no_items()
    """existing: {address} or {scheduler_file}, and {tls_ca_file, tls_cert, tls_key} where it has TLS. pbs to oar:
    arguments for dask-jobqueue's job class, for all roles, and below `trainer` and `explorer` for one."""
    slurm: SlurmConfig = SlurmConfig()
    """slurm: what the jobs of each role ask for."""
    interface: str | None = None
    """Network interface of the machine of the scheduler that the workers reach. None: the one that leads outside."""
    private_folder: str | None = None
    """Folder that all machines see and only its owner may read, for the scheduler's address and the TLS keys. None:
    inside the run folder, or below ~/.rftdask where that is not a local path."""
    tls: bool = True
    """Encrypt and authenticate what the machines of a cluster say to each other. A scheduler without it obeys anybody
    who reaches its port."""
    dashboard_address: str | None = None
    """host:port of Dask's dashboard, such as 127.0.0.1:8787; it has no password. None: no dashboard."""
    max_queue_s: Seconds = 7 * 86400.0
    """How long the workers of a role may wait in the queue of a batch system before the run fails."""
    node_num: Natural = 0
    """Number of machines to place roles on. 0: detect; slurm: those of the partition."""
    gpu_per_node: Natural = 0
    """GPUs of each machine. 0: detect, which may find none."""
    num_cpus: Count | None = None
    """CPU cores to share out among the roles as threads. None: all cores of the machine."""
    ray_address: Annotated[str, Ignored("there is no Ray; see cluster.type")] = "auto"
    """Address of a Ray cluster."""
    total_gpu_num: Annotated[Any, Derived()] = None
    """Derived."""
    rollout_gpu_num: Annotated[Any, Derived()] = None
    """Derived."""
    auxiliary_model_gpu_num: Annotated[Any, Derived()] = None
    """Derived."""
    explorer_gpu_num: Annotated[Any, Derived()] = None
    """Derived."""
    trainer_gpu_num: Annotated[Any, Derived()] = None
    """Derived."""
