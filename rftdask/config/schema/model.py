"""Section `model`: the trained model, its lengths and sampling."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rftdask.config.base import Computed, Count, MayChange, Natural, Problem, Section, absent, reading


class LoraConfig(Section):
    """One item of `model.lora_configs`."""

    path: str | None = None
    """Folder of a trained adapter to start from. None: a new adapter."""
    lora_rank: Count = 32
    """Rank of the update."""
    lora_alpha: Count = 32
    """Scale of the update, before division by the rank."""
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the adapter. auto: float32."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Layers that get an adapter."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers without an adapter. None: no exceptions."""
    use_rslora: bool = False
    """Divide the scale by the square root of the rank, so that large ranks learn as fast as small ones."""
    use_dora: bool = False
    """Train magnitude and direction of the weights' columns separately. Slower, sometimes better."""


class ExternalModelConfig(Section):
    """`model.external_model`: a model behind an OpenAI-compatible API, for mode bench."""

    enable: bool = False
    """Evaluate this model instead of the policy."""
    base_url_env: Annotated[str, MayChange()] = "OPENAI_BASE_URL"
    """Environment variable with the address."""
    api_key_env: Annotated[str, MayChange()] = "OPENAI_API_KEY"
    """Environment variable with the key."""
    model_name: str | None = None
    """Name of the model at the service."""


class TinkerConfig(Section):
    """`model.tinker`: a LoRA adapter of a model at the Tinker service, which trains it and samples from it. The key is
    in the environment variable TINKER_API_KEY."""

    enable: bool = False
    """Train and sample at the service: sets `trainer.trainer_type` and `explorer.rollout_model.engine_type` to tinker.
    `model_path` is the model's name at the service and the source of the tokenizer."""
    rank: Count = 16
    """Rank of the adapter."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the initial adapter weights. None: the run's seed."""
    train_mlp: bool = True
    """Adapt the MLP layers, including experts."""
    train_attn: bool = True
    """Adapt the attention layers."""
    train_unembed: bool = True
    """Adapt the output layer."""
    base_url: Annotated[str | None, MayChange()] = None
    """Address of the service. None: the environment variable TINKER_BASE_URL, else the hosted service."""

    @reading("train_mlp", "train_attn", "train_unembed")
    def _adapter_has_layers(self) -> Iterator[Problem]:
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            yield "", "the adapter has no layers; set train_mlp, train_attn or train_unembed to true"


class ModelConfig(Section):
    """`model`: the policy, its lengths in tokens and its sampling."""

    model_path: str = Field(min_length=1)
    """Folder in the Hugging Face layout, or a name on the Hugging Face Hub. Also the source of the tokenizer."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model. Only for authors you trust."""
    critic_model_path: str | None = None
    """Model whose body initializes the critic of ppo. None or "": `model_path`."""
    custom_chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's. Overrides `chat_template_path`. None: no replacement."""
    chat_template_path: str | None = None
    """File with a chat template. None: the tokenizer's."""
    enable_thinking: bool | None = None
    """Value of `enable_thinking` for the chat template, which makes the model think or not. None: the template's
    default."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of training rollouts. 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample among the most likely tokens with this total probability. 1: all."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample among this many most likely tokens. -1: all."""
    max_model_len: Annotated[int, Computed("max_prompt_tokens + max_response_tokens")] = absent(ge=2)
    """Maximum length of prompt and response together. None: the sum of the two limits below."""
    max_prompt_tokens: Annotated[Count, Computed("what max_model_len leaves")] = absent()
    """Maximum prompt length. None: what `max_model_len` leaves, or half of it."""
    max_response_tokens: Annotated[Count, Computed("what max_model_len leaves")] = absent()
    """Maximum response length. None: what `max_model_len` leaves, or half of it."""
    min_response_tokens: Natural = 0
    """Minimum response length; no end of sequence is sampled before it."""
    enable_prompt_truncation: bool = True
    """True: a prompt that is too long is truncated, and its rollout is not trained. False: its task fails."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divisor of the logits of tokens seen before. 1: none."""
    lora_configs: Annotated[tuple[LoraConfig, ...] | None, Field(max_length=1)] = None
    """Adapter to train instead of all weights, one at most. Needs the extra `lora`. None: train all weights."""
    external_model: ExternalModelConfig = ExternalModelConfig.model_construct()
    """A model behind an API, evaluated in mode bench. Auxiliary models with engine external use the same environment
    variables."""
    tinker: TinkerConfig = TinkerConfig.model_construct()
    """The policy at the Tinker service. Needs the extra `tinker`."""

    @reading("max_model_len", "max_prompt_tokens", "max_response_tokens", "min_response_tokens")
    def _lengths_fit(self) -> Iterator[Problem]:
        total, prompt, response = self.max_model_len, self.max_prompt_tokens, self.max_response_tokens
        if total is None:
            yield "max_model_len", "required, unless max_prompt_tokens and max_response_tokens are both given"
            return
        if prompt + response > total:
            # Both at their longest must fit, or a long prompt would leave no room for its answer.
            needed = f"max_prompt_tokens {prompt} + max_response_tokens {response} = {prompt + response}"
            yield "max_model_len", f"{needed} exceeds max_model_len {total}; lower one of them or raise max_model_len"
        if self.min_response_tokens > response:
            yield "min_response_tokens", f"{self.min_response_tokens} exceeds max_response_tokens {response}"
