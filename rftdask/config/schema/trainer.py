"""Sections `trainer` and `synchronizer`: training, checkpoints, and the transfer of weights."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from rftdask.config.base import (
    NAME,
    Aliases,
    Computed,
    Count,
    MayChange,
    Natural,
    PluginName,
    Problem,
    Seconds,
    Section,
    absent,
    reading,
)
from rftdask.config.plugins import lookup_part, read_parts, trait

registered_train_engines = partial(read_parts, "rftdask.trainer.engines", "trainer_type")
"""Returns trainer_type -> class, of this package's trainer engines, read from their source because they load torch."""
DEFAULT_TOKENS_PER_MICRO_BATCH = 16_384


class CriticConfig(Section):
    """`trainer.critic`: value model of ppo, trained with the policy and the optimizer's other settings."""

    lr: float = Field(default=1e-5, ge=0)
    """Learning rate, constant."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """Maximum change of a value from its old value before its gradient is cut."""


class TrainerConfig(Section):
    """`trainer`: steps, each with the updates of one batch, and checkpoints. Intervals count steps."""

    name: Annotated[str, MayChange()] = Field(default="trainer", pattern=NAME)
    """Name in the plan of `rftdask validate`, and in estimates."""
    trainer_type: Annotated[
        str,
        PluginName("trainer engine", registered_train_engines, needed=True),
        Aliases({"verl": "torch"}, "veRL is not used; our PyTorch trainer takes its place"),
    ] = "torch"
    """torch: our PyTorch trainer. tinker: training at the Tinker service (`model.tinker`). fake: counts and publishes
    without learning, for tests."""
    trainer_strategy: Annotated[
        Literal["single", "ddp", "fsdp2"],
        Aliases(
            {"fsdp": "fsdp2", "megatron": "fsdp2"},
            "fsdp2 takes the place of PyTorch's first FSDP and of Megatron, whose sizes are tensor_parallel_size and "
            "ulysses_sequence_parallel_size here",
        ),
        MayChange(),
    ] = "fsdp2"
    """How ranks share the model. fsdp2: each holds a part of weights, gradients and optimizer state. ddp: each holds
    all of it. single: one rank. With one rank all three are equal."""
    num_ranks: Annotated[Count | None, MayChange()] = None
    """Ranks of the trainer, each on its own worker and GPU. None: as many as explorers leave GPUs; on CPUs, one."""
    max_restarts: Annotated[Natural, MayChange()] = 3
    """Maximum restarts from the newest checkpoint after a rank was lost, without a new step in between. Workers taken
    away by a batch system (preempted, walltime) do not count, up to 20 times."""
    gradient_checkpointing: Annotated[bool, MayChange()] = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""
    torch_compile: Annotated[bool, MayChange()] = False
    """Compile the policy's layers with torch.compile. The first steps are slow, and rounding differs."""
    reshard_after_forward: Annotated[bool, MayChange()] = True
    """fsdp2: free a layer's weights between its forward and backward pass: less memory, more communication."""
    prefetch_layers: Annotated[Natural, MayChange()] = 0
    """fsdp2: layers whose weights are fetched in advance. 0: PyTorch's default, one in the backward pass."""
    micro_batch_size: Annotated[Count | None, MayChange()] = None
    """Experiences in one forward and backward pass. None: `max_token_len_per_gpu` decides."""
    max_token_len_per_gpu: Annotated[Count | None, MayChange()] = None
    """Tokens in one pass; nothing is padded. A longer experience gets a pass of its own. The gradient does not depend
    on it. Ranks that split sequences have this limit each. None: 16384."""
    ppo_epochs: Count = 1
    """Passes over each batch. All updates from one batch are one step."""
    ppo_mini_batch_size: Count | None = None
    """Experiences of one update, counted as in `buffer.train_batch_size`, which it must divide. None: the whole batch.
    """
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Mixtures of experts: weight of the load-balancing loss, computed for each pass as in transformers. 0: none."""
    save_interval: Annotated[Natural, MayChange()] = 0
    """Steps between checkpoints. 0: only after the last step, and by `save_minutes`."""
    save_minutes: Annotated[float, MayChange()] = Field(default=10.0, ge=0)
    """Minutes of training after which a checkpoint is written in any case, the maximum that a killed trainer loses. Of
    these, and of checkpoints of stopped runs, one is kept in addition to the newest. 0: none."""
    eval_interval: Annotated[Natural, MayChange()] = 0
    """Steps between evaluations on `buffer.trainer_input.eval_buffer` and, if a dataset is trained, on `eval_tasksets`.
    0: only before the first step and after the last."""
    total_steps: Annotated[Count | None, MayChange()] = None
    """Steps to train. None: until the experiences end."""
    save_hf_checkpoint: Annotated[Literal["last", "always", "never"], MayChange()] = "last"
    """Checkpoints that also contain the model in the Hugging Face layout."""
    grad_clip: Annotated[float, Computed("algorithm.optimizer.clip_grad, else 1.0")] = absent(ge=0)
    """Maximum gradient norm. 0: no limit."""
    max_checkpoints_to_keep: Annotated[Natural, MayChange()] = 5
    """Number of checkpoints; older ones are removed. Each takes 12 bytes per weight with AdamW. 0: keep all of
    `save_interval` and of ends."""
    use_dynamic_bsz: Annotated[bool, MayChange()] = True
    """True: a pass takes as many experiences as `max_token_len_per_gpu` tokens allow, and at most `micro_batch_size`.
    False: `micro_batch_size` experiences of any length; if that is None, one."""
    critic: CriticConfig = CriticConfig.model_construct()
    """Value model of ppo."""
    critic_warmup: Natural = 0
    """Number of first steps that train only the critic."""
    ulysses_sequence_parallel_size: Annotated[Count, MayChange()] = 1
    """Ranks that split the tokens of each pass. Must divide `num_ranks` and the attention heads."""
    tensor_parallel_size: Annotated[Count, MayChange()] = 1
    """Ranks that split each layer by the model's own plan (in a mixture, each has some of the experts) and compute the
    same experiences. fsdp2 shards each part over the ranks that hold it. Must divide `num_ranks`, the heads, the inner
    width and the experts."""
    master_weights: Literal["float32", "bfloat16"] = "float32"
    """Data type of the optimizer's weights and of gradients. bfloat16: half of the memory, with stochastic rounding, so
    that small steps add up (fsdp2, with an optimizer of torchao.optim)."""
    offload_policy: Annotated[bool, MayChange()] = False
    """fsdp2: keep weights, gradients and optimizer state in host memory, and run the optimizer there."""
    save_strategy: Annotated[Literal["single_thread", "single_process", "single_node", "unrestricted"], MayChange()] = (
        "unrestricted"
    )
    """Ranks that may write their part of a checkpoint at the same time, in the background. unrestricted: all.
    single_node: those of one host. single_process: one. single_thread: one, and training waits for it."""

    @reading("trainer_strategy", "num_ranks")
    def _ranks_fit_the_strategy(self) -> Iterator[Problem]:
        if self.trainer_strategy == "single" and (self.num_ranks or 1) > 1:
            why = "cannot share a model by trainer_strategy single"
            yield "num_ranks", f"{self.num_ranks} ranks {why}; use ddp or fsdp2"

    @reading("trainer_strategy", "num_ranks", "ulysses_sequence_parallel_size", "tensor_parallel_size", "torch_compile")
    def _ranks_make_whole_groups(self) -> Iterator[Problem]:
        split, cut, num_ranks = self.ulysses_sequence_parallel_size, self.tensor_parallel_size, self.num_ranks
        for key, size, what in (
            ("ulysses_sequence_parallel_size", split, "split sequences"),
            ("tensor_parallel_size", cut, "cut layers"),
        ):
            if size > 1 and self.trainer_strategy == "single":
                yield key, f"{size} ranks {what}, and trainer_strategy single is one rank; use ddp or fsdp2"
            # A number of ranks that is not given follows from the GPUs, and is checked where they are known.
            elif num_ranks is not None and num_ranks % size:
                why = f"groups of {size} ranks {what}, and num_ranks {num_ranks} is not a multiple of {size}"
                yield key, f"{why}; use num_ranks {-(-num_ranks // size) * size}"
        # The plan of a model that cuts its layers knows whole sequences and eager layers.
        others = {"ulysses_sequence_parallel_size; use one of them": split > 1, "torch_compile": self.torch_compile}
        for other, chosen in others.items():
            if cut > 1 and chosen:
                yield "tensor_parallel_size", f"{cut} does not go with {other}"

    @reading("router_aux_loss_coef", "ulysses_sequence_parallel_size", "torch_compile")
    def _routers_are_visible(self) -> Iterator[Problem]:
        split = "ulysses_sequence_parallel_size, where each rank sees a part of a sequence"
        others = {
            split: self.ulysses_sequence_parallel_size > 1,
            "torch_compile, which hides the routers": self.torch_compile,
        }
        for other, chosen in others.items():
            if self.router_aux_loss_coef and chosen:
                yield "router_aux_loss_coef", f"{self.router_aux_loss_coef} does not go with {other}"

    @property
    def has_model(self) -> bool:
        """True if the engine trains a model, which must exist. Raises: UserError: no such engine."""
        return bool(self._trait("has_model"))

    @property
    def is_hosted(self) -> bool:
        """True if a service trains the model. Raises: UserError: no such engine."""
        return bool(self._trait("is_hosted"))

    def _trait(self, name: str) -> Any:
        return trait(lookup_part("trainer engine", self.trainer_type, registered_train_engines()), name)

    @property
    def max_rows_per_micro_batch(self) -> int | None:
        """Maximum experiences in one forward and backward pass. None: no limit."""
        return self.micro_batch_size or (None if self.use_dynamic_bsz else 1)

    @property
    def max_tokens_per_micro_batch(self) -> float:
        """Maximum tokens in one forward and backward pass. inf: no limit."""
        if not self.use_dynamic_bsz:
            return math.inf
        return self.max_token_len_per_gpu or DEFAULT_TOKENS_PER_MICRO_BATCH


class SynchronizerConfig(Section):
    """`synchronizer`: when explorers get new weights, and how old a trained experience may be.

    Explorer intervals count explore steps, trainer intervals count optimizer steps.
    """

    sync_method: Annotated[
        Literal["auto", "checkpoint", "memory", "nccl"],
        Aliases({"online": "nccl", "offline": "checkpoint"}, "the name is deprecated"),
        MayChange(),
    ] = "auto"
    """How weights travel. checkpoint: through files in the run folder. memory, nccl: the trainer keeps them in its
    machines' memory (/dev/shm), which engines there map, and writes files only with each checkpoint; other machines get
    them through Dask workers (memory) or a gloo process group in host memory (nccl). auto: memory if one machine runs
    on an object store, else checkpoint. Training is the same in all cases. Commands with only one role use checkpoint.
    """
    sync_style: Annotated[
        Literal["fixed", "explorer_driven", "trainer_driven", "fully_async"],
        Aliases(
            {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}, "the name is deprecated"
        ),
    ] = "fixed"
    """Which side decides when weights are transferred. fully_async: explorers take new weights as soon as they are
    published."""
    sync_interval: Count = 1
    """Steps between transfers, for both roles."""
    explorer_sync_interval: Annotated[Count, Computed("sync_interval")] = absent()
    """Explore steps between transfers. None: `sync_interval`."""
    trainer_sync_interval: Annotated[Count, Computed("sync_interval")] = absent()
    """Train steps between publications. None: `sync_interval`."""
    sync_offset: Natural = 0
    """Explore steps before the first interval starts: the lead of the explorers."""
    sync_timeout: Annotated[Seconds, MayChange()] = 3600.0
    """Seconds to wait for the other role before an error."""
    max_staleness: Natural | None = None
    """Maximum policy versions between the weights that sampled a token and the weights that train it. None: the bound
    of staleness_control in `algorithm.sample_strategy_args`, else the bound of the sync style."""
    load_in_flight: bool = False
    """fully_async: engines load new weights between two tokens of running responses, which then span versions;
    staleness counts from the oldest. False: engines load when no request is running."""
    full_publish_interval: Annotated[Count, MayChange()] = 1
    """Publications from one full set of weights to the next. Those in between are published as deltas to the previous
    version if the delta is less than half the size: with engines in bfloat16 and small learning rates, a few percent.
    1: every publication is full."""
    poll_interval_s: Annotated[Seconds, MayChange()] = 0.05
    """Seconds between polls of the pointer to the newest weights."""

    @reading("full_publish_interval", "sync_method")
    def _deltas_are_files(self) -> Iterator[Problem]:
        if self.full_publish_interval > 1 and self.sync_method in ("memory", "nccl"):
            why = f"deltas are files, and sync_method {self.sync_method} writes only full versions"
            remedy = "set 1, or sync_method: checkpoint"
            yield "full_publish_interval", f"{self.full_publish_interval}: {why}; {remedy}"

    @reading("load_in_flight", "sync_style")
    def _style_loads_in_flight(self) -> Iterator[Problem]:
        if self.load_in_flight and self.sync_style != "fully_async":
            yield "load_in_flight", f"sync_style {self.sync_style} loads at its boundaries; use fully_async"
