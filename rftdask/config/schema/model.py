"""Section `model`: what is trained, with which lengths and sampling."""

from typing import Annotated, Literal

from pydantic import Field

from rftdask.config.base import Computed, Count, Natural, Section, absent


class LoraConfig(Section):
    """One item of `model.lora_configs`."""

    path: str | None = None
    """Folder of a trained adapter to begin with. None: a fresh one."""
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


class TinkerConfig(Section):
    """`model.tinker`: a LoRA adapter of a model at the Tinker service, which trains it and samples from it. The key is
    in the environment variable TINKER_API_KEY."""

    enable: bool = False
    """Train and sample there: `trainer.trainer_type` and `explorer.rollout_model.engine_type` are tinker. The model is
    the one that the service knows by the name in `model_path`, from which the tokenizer comes, too."""
    rank: Count = 16
    """Rank of the adapter."""
    seed: int | None = None
    """Seed of its first weights. None: the run's."""
    train_mlp: bool = True
    """Whether it is in the MLP layers, experts included,"""
    train_attn: bool = True
    """in the attention layers,"""
    train_unembed: bool = True
    """and in the output layer."""
    base_url: str | None = None
    """Address of the service. None: that in the environment variable TINKER_BASE_URL, else the hosted one."""


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
    enable_thinking: bool | None = None
    """Whether the chat template asks the model to think, given to it as `enable_thinking`. None: the template's own
    default."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of training rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the likeliest tokens that together have this probability; 1 is all."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among this many likeliest tokens; -1 is all."""
    max_model_len: Annotated[int, Computed("max_prompt_tokens + max_response_tokens")] = absent(ge=2)
    """Longest sequence, prompt and response together. None: the sum of the two limits below."""
    max_prompt_tokens: Annotated[Count, Computed("what max_model_len leaves")] = absent()
    """Longest prompt. None: what `max_model_len` leaves, or half of it."""
    max_response_tokens: Annotated[Count, Computed("what max_model_len leaves")] = absent()
    """Longest response. None: what `max_model_len` leaves, or half of it."""
    min_response_tokens: Natural = 0
    """No end of sequence is sampled before this many tokens."""
    enable_prompt_truncation: bool = True
    """True: a prompt that is too long is cut and its rollout is not trained on. False: its task fails."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the logits of tokens seen before; 1 is none."""
    lora_configs: Annotated[tuple[LoraConfig, ...] | None, Field(max_length=1)] = None
    """The adapter to train in place of all weights, one at most. Needs the extra `lora`."""
    external_model: ExternalModelConfig = ExternalModelConfig()
    """A model behind an API, evaluated in mode bench; its environment variables are also those of auxiliary models of
    engine external."""
    tinker: TinkerConfig = TinkerConfig()
    """The policy at the Tinker service. Needs the extra `tinker`."""
