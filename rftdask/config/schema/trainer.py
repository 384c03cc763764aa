"""Sections `trainer` and `synchronizer`: how weights are made, kept and handed over."""

import math
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from rftdask.config.base import NAME, Aliases, Computed, Count, Natural, PluginName, Seconds, Section, absent
from rftdask.config.plugins import lookup_part, read_parts, trait

registered_train_engines = partial(read_parts, "rftdask.trainer.engines", "trainer_type")
"""Call for trainer_type -> class, of the trainer engines of this package; read from their source: they load torch."""
DEFAULT_TOKENS_PER_MICRO_BATCH = 16_384


class CriticConfig(Section):
    """`trainer.critic`: the value model of ppo, trained beside the policy with the optimizer's other settings."""

    lr: float = Field(default=1e-5, ge=0)
    """Learning rate, constant."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """A value may move this far from its old one before its loss stops pulling it further."""


class TrainerConfig(Section):
    """`trainer`: steps, each the updates from one batch, and checkpoints. Intervals are steps."""

    name: str = Field(default="trainer", pattern=NAME)
    """Name in the plan that `rftdask validate` prints, and in estimates."""
    trainer_type: Annotated[
        str,
        PluginName("trainer engine", registered_train_engines, needed=True),
        Aliases({"verl": "torch"}, "veRL is not used; our PyTorch trainer takes its place"),
    ] = "torch"
    """torch: our PyTorch trainer. tinker: at the Tinker service (`model.tinker`). fake: counts and publishes without
    learning, for tests."""
    trainer_strategy: Annotated[
        Literal["single", "ddp", "fsdp2"],
        Aliases(
            {"fsdp": "fsdp2", "megatron": "fsdp2"},
            "fsdp2 takes the place of PyTorch's first FSDP and of Megatron, whose sizes are tensor_parallel_size and "
            "ulysses_sequence_parallel_size here",
        ),
    ] = "fsdp2"
    """How ranks share the model. fsdp2: each holds a part of weights, gradients and optimizer state. ddp: each holds
    all of it. single: there is one rank. With one rank all three are the same."""
    num_ranks: Count | None = None
    """Ranks of the trainer, each on a worker and a GPU of its own. None: as many as explorers leave GPUs; one on a
    CPU."""
    max_restarts: Natural = 3
    """How often the ranks are started again, from the newest checkpoint, after one of them was lost without a new step
    in between. A worker that a batch system took away by itself (preempted, at its walltime) is not counted, up to 20
    times."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass in place of keeping them: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile the layers of the policy with torch.compile. The first steps are slow, rounding differs."""
    reshard_after_forward: bool = True
    """fsdp2: give up a layer's weights between its forward and its backward pass: less memory, more transfers."""
    prefetch_layers: Natural = 0
    """fsdp2: layers whose weights are asked for ahead. 0: PyTorch's own rule, one ahead in the backward pass."""
    micro_batch_size: Count | None = None
    """Experiences in one forward and backward pass. None: as `max_token_len_per_gpu` allows."""
    max_token_len_per_gpu: Count | None = None
    """Tokens in one such pass; nothing is padded. None: `DEFAULT_TOKENS_PER_MICRO_BATCH`. An experience that is longer
    goes alone. The gradient does not depend on it. Ranks that split sequences take so many each."""
    ppo_epochs: Count = 1
    """Passes over each batch. All updates from one batch are one step."""
    ppo_mini_batch_size: Count | None = None
    """Experiences of a batch that make one update, counted as `buffer.train_batch_size` is, which it divides. None: all
    of them."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Mixtures of experts: weight of the loss that keeps experts evenly used, as transformers computes it of each pass.
    0: none."""
    save_interval: Natural = 0
    """Steps between checkpoints. 0: only after the last step, and as `save_minutes` says."""
    save_minutes: float = Field(default=10.0, ge=0)
    """Minutes of training after which there is a checkpoint in any case, which is the most that a killed trainer loses.
    Of these, and of those of a stop before the end, one stays beside the newest checkpoint. 0: none."""
    eval_interval: Natural = 0
    """Steps between evaluations on `buffer.trainer_input.eval_buffer`, and, where a dataset is trained, of
    `eval_tasksets`. 0: before the first and after the last alone."""
    total_steps: Count | None = None
    """Steps to train. None: until the experiences end."""
    save_hf_checkpoint: Literal["last", "always", "never"] = "last"
    """Which checkpoints hold a folder in the Hugging Face layout as well."""
    grad_clip: Annotated[float, Computed("algorithm.optimizer.clip_grad, else 1.0")] = absent(ge=0)
    """Largest norm of the gradient; 0 means no limit."""
    max_checkpoints_to_keep: Natural = 5
    """Older checkpoints are removed; each takes 12 bytes a weight with AdamW. 0: all of `save_interval` and of the ends
    are kept."""
    use_dynamic_bsz: bool = True
    """True: a pass takes as many experiences as `max_token_len_per_gpu` tokens allow, and at most `micro_batch_size`.
    False: `micro_batch_size` experiences, whatever their length; without one, a single one."""
    critic: CriticConfig = CriticConfig()
    """The value model of ppo."""
    critic_warmup: Natural = 0
    """First steps, which train the critic alone."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks that split each pass among them, every one with a part of its tokens. Divides `num_ranks` and the
    attention heads."""
    tensor_parallel_size: Count = 1
    """Ranks that cut each layer among them, as the model's own plan says (each has some experts of a mixture), and
    compute the same experiences. fsdp2: what a rank has of a layer is spread over the ranks that have the same part.
    Divides `num_ranks`, the heads, the inner width and the experts."""
    master_weights: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights that the optimizer moves, and of their gradients. bfloat16: half of the memory; each
    step is rounded at random, up or down, so that small ones add up (fsdp2, with an optimizer of torchao.optim)."""
    offload_policy: bool = False
    """fsdp2: weights, gradients and optimizer state in host memory, and the optimizer steps there."""
    save_strategy: Literal["single_thread", "single_process", "single_node", "unrestricted"] = "unrestricted"
    """Which ranks may write their part of a checkpoint at once, beside the training. unrestricted: all. single_node:
    those of one host. single_process: one. single_thread: one, and the training waits for it."""

    @property
    def has_model(self) -> bool:
        """Whether the engine trains a model, which has to be there. Raises: UserError: there is no such engine."""
        return bool(self._trait("has_model"))

    @property
    def is_hosted(self) -> bool:
        """Whether a service trains the model. Raises: UserError: there is no such engine."""
        return bool(self._trait("is_hosted"))

    def _trait(self, name: str) -> Any:
        return trait(lookup_part("trainer engine", self.trainer_type, registered_train_engines()), name)

    @property
    def max_rows_per_micro_batch(self) -> int | None:
        """Experiences in one forward and backward pass at most; None: no limit."""
        return self.micro_batch_size or (None if self.use_dynamic_bsz else 1)

    @property
    def max_tokens_per_micro_batch(self) -> float:
        """Tokens in one forward and backward pass at most, whatever the number of experiences; inf: no limit."""
        if not self.use_dynamic_bsz:
            return math.inf
        return self.max_token_len_per_gpu or DEFAULT_TOKENS_PER_MICRO_BATCH


class SynchronizerConfig(Section):
    """`synchronizer`: when explorers get new weights, and how old an experience may be when it is trained on.

    Explorer intervals count explore steps, trainer intervals optimizer steps.
    """

    sync_method: Annotated[
        Literal["auto", "checkpoint", "memory", "nccl"],
        Aliases({"online": "nccl", "offline": "checkpoint"}, "the name is deprecated"),
    ] = "auto"
    """How weights travel. checkpoint: through files of the run. memory, nccl: the trainer holds them in the memory of
    its machines (/dev/shm), which engines there map, and writes files with each checkpoint alone; other machines get
    them from Dask workers (memory), or by a process group of gloo, through host memory (nccl). auto: memory where one
    machine runs on an object store, else checkpoint. What is trained is the same. A command with one role alone takes
    checkpoint."""
    sync_style: Annotated[
        Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"],
        Aliases(
            {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}, "the name is deprecated"
        ),
    ] = "fixed"
    """Who decides when weights are handed over. fully_async: explorers take new weights as soon as they are there."""
    sync_interval: Count = 1
    """Steps between hand-overs, for both roles."""
    explorer_sync_interval: Annotated[Count, Computed("sync_interval")] = absent()
    """Explore steps between hand-overs. None: `sync_interval`."""
    trainer_sync_interval: Annotated[Count, Computed("sync_interval")] = absent()
    """Train steps between publications. None: `sync_interval`."""
    sync_offset: Natural = 0
    """Explore steps before the first interval begins: how far explorers may run ahead."""
    sync_timeout: Seconds = 3600.0
    """Seconds to wait for the other side before it is an error."""
    max_staleness: Natural | None = None
    """Most policy versions between the weights that sampled a token and those it trains. None: the bound of
    staleness_control in `algorithm.sample_strategy_args` if given there, else what the style implies."""
    load_in_flight: bool = False
    """fully_async: engines load new weights between two tokens of the responses under way, which then span versions;
    their staleness counts from the oldest. Else they load when nothing is under way."""
    full_publish_interval: Count = 1
    """Publications from one of the whole weights to the next. Those between are published as what has changed since the
    one before, where that is less than half: with engines in bfloat16 and small learning rates, a few percent. 1: each
    is whole."""
    poll_interval_s: Seconds = 0.05
    """Seconds between looks at the pointer to the newest weights."""
