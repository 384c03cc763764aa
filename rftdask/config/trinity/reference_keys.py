"""Keys of the reference system (Trinity-RFT) that no field stands for: each with what is told of it, and why.

A file written for the reference is read as it is. Those of its keys that mean nothing here are in `REFERENCE_KEYS`, by
the class of their section; the loader tells of them and leaves them out, so that no Config has them. The module knows
neither the sections nor how a tree is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Ignored:
    """Accepted and without effect: one warning with the reason when set to something else than the default."""

    reason: str
    default: Any = None
    """Of the reference system, as plain data."""


@dataclass(frozen=True)
class Missing:
    """Refused when set to something else than the default: the feature is not there yet."""

    feature: str
    """What is missing, as it ends the sentence "not available in this release: ..."."""
    default: Any = None
    allowed: tuple[Any, ...] = ()
    """Not refused either, because it means the same as the default."""


@dataclass(frozen=True)
class Derived:
    """Never set by a user: the reference system fills it, or we compute it where it is needed."""


@dataclass(frozen=True)
class Secret:
    """Never read from a file: secrets come from environment variables. Its value is never shown."""

    instead: str
    """What to do instead."""


@dataclass(frozen=True)
class Renamed:
    """An old name of another key of the same section: its value moves there, with a warning."""

    to: str


ReferenceKey = Ignored | Missing | Derived | Secret | Renamed | Mapping[str, "ReferenceKey"]
"""What is told of a key; a mapping is a section that has nothing but such keys."""


def _ignored(reason: str, **defaults: Any) -> dict[str, ReferenceKey]:
    return {key: Ignored(reason, default) for key, default in defaults.items()}


def _missing(feature: str, **defaults: Any) -> dict[str, ReferenceKey]:
    return {key: Missing(feature, default) for key, default in defaults.items()}


def _derived(*keys: str) -> dict[str, ReferenceKey]:
    return dict.fromkeys(keys, Derived())


_LOGPROBS = "the log-probability of every sampled token is always recorded"
_THINKING = "switching the thinking mode of a chat template"

# As a table: the keys that have one reason stand together.
# fmt: off
REFERENCE_KEYS: Mapping[str, Mapping[str, ReferenceKey]] = {
    "Config": {
        **_ignored("there is no Ray", ray_namespace=""),
        **_ignored("mistakes are errors, and there are no suggestions", ignore_validator_suggestions=False),
    },
    "DataJuicerServiceConfig": _ignored("no service is started: without a server_url operators run in a process beside "
                                        "the run", auto_start=False, port=None),
    "OptimizerConfig": {"warmup_style": Renamed("lr_scheduler_type")},
    "LoraConfig": {
        **_ignored("there is one adapter", name=None),
        **_ignored("adapters are of the model in model.model_path", base_model_name=None),
        **_derived("is_dummy"),
    },
    "ModelConfig": {
        **_ignored(_LOGPROBS, logprobs=0),
        **_missing("this setting of vLLM's adapters; explorer.rollout_model.extra_engine_args takes it",
                   fully_sharded_loras=False, max_cpu_loras=None),
        **_missing("changing the rotary embedding", rope_scaling=None, rope_theta=None),
    },
    "ClusterConfig": {
        **_ignored("there is no Ray; see cluster.type", ray_address="auto"),
        **_derived("total_gpu_num", "rollout_gpu_num", "auxiliary_model_gpu_num", "explorer_gpu_num",
                   "trainer_gpu_num", "trainer_node_num", "trainer_gpu_num_per_node"),
    },
    "BufferConfig": _derived("explorer_output", "tokenizer_path", "cache_dir"),
    "FormatConfig": {
        **_missing("a chat template for one dataset", chat_template=None),
        **_missing(_THINKING, enable_thinking=None),
    },
    "RolloutArgs": {**_ignored(_LOGPROBS, logprobs=0), **_derived("n")},
    "TasksetConfig": {
        "task_selector": Renamed("data_selector"),
        **_ignored("the limits of section buffer are those of all data", total_epochs=1, total_steps=None),
        **_derived("batch_size", "index", "is_eval", "ray_namespace"),
        **_ignored("there is one progress display for the whole run", enable_progress_bar=False),
        **_ignored("reads are retried by the storage layer", max_retry_times=3, max_retry_interval=1.0),
    },
    "ExperienceBufferConfig": {
        **_ignored("there is one progress display for the whole run", enable_progress_bar=False),
        **_ignored("buffer.total_epochs is that of all data", total_epochs=1),
        **_ignored("the algorithm says what rows are", schema_type=None),
        **_ignored("reads are retried by the storage layer", max_retry_times=3, max_retry_interval=1.0),
        **_ignored("the limits of section buffer are those of all data", total_steps=None),
        **_derived("index", "batch_size", "tokenizer_path", "ray_namespace"),
    },
    "InferenceModelConfig": {
        **_missing("cutting the prompts of one engine; set the same key in section model",
                   enable_prompt_truncation=None),
        **_missing("generating past the end of sequence", ignore_eos=False),
        **_ignored("a model that reads images is given those of tasks (format.image_key)", enable_multimodal=False),
        **_missing("a chat template of one engine; set model.custom_chat_template", chat_template=None),
        **_ignored("every call of a workflow is recorded, and model.openai_client() is always there",
                   enable_history=False, enable_openai_api=False),
        **_ignored("calls of tools in an answer are always told apart where the request has tools",
                   enable_auto_tool_choice=False),
        **_ignored("vLLM has no other version any more", use_v1=True),
        **_ignored(_LOGPROBS, logprobs=None),
        **_ignored("what was asked is in the experiences", enable_log_requests=False),
        **_ignored("engines open no port", base_port=None),
        **_ignored("weights travel through files", weight_sync_buffer_size=1024),
        "api_key": Secret("keys are read from environment variables"),
        **_missing("trusting the code of one model alone; model.trust_remote_code is of all", trust_remote_code=False),
        **_derived("bundle_indices", "nnodes", "node_rank", "enable_lora", "lora_modules", "lora_kwargs",
                   "enable_runtime_lora_updating", "enable_return_routed_experts", "gpu_per_engine", "engine_id",
                   "external_model_config", "ray_namespace", "ray_actor_name", "sync_method", "checkpoint_job_dir",
                   "cuda_visible_devices", "rope_scaling", "rope_theta"),
    },
    "ExplorerConfig": {
        **_ignored("there are no runner processes: rollouts are concurrent coroutines",
                   runner_per_model=8, runner_prepare_concurrency=8, runner_prepare_max_retries=2, runner_num=None,
                   concurrent_mode="sequential", runner_state_report_interval=0),
        **_ignored("every rollout of a task runs, fails and is retried on its own, as with 1",
                   max_repeat_times_per_runner=None),
        **_ignored("synchronizer.max_staleness bounds the lead", max_inflight_batches=2),
        **_ignored("a server looks five times a second whether its engines live",
                   service_status_check_interval=60.0, min_running_model_num=1, db_url=None),
    },
    "TrainerConfig": {
        **_ignored("trackers are given a table of rollouts of each step in any case, and the experience log has all",
                   enable_preview=False),
        **_ignored("rows are always packed and dealt evenly, and no loss depends on it",
                   use_remove_padding=True, balance_batch=True),
        **_ignored("the loss is always normalized over the whole batch", fix_actor_microbatch_loss_scale=False),
        **_ignored("use trainer.offload_policy, which offloads all three",
                   param_offload=False, optimizer_offload=False, grad_offload=False),
        **_ignored("it is read key by key (translate.py)", trainer_config={}),
        **_derived("trust_remote_code"),
        "trainer_config_path": Missing("veRL configuration files", allowed=("",)),
        "megatron": {
            **_missing("pipelines: PyTorch's take micro-batches of one length, and packed ones differ; use "
                       "trainer.tensor_parallel_size",
                       pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None),
            **_missing("experts on other ranks than those that cut layers; use trainer.tensor_parallel_size",
                       expert_model_parallel_size=1, expert_tensor_parallel_size=None),
            **_ignored("norms are computed whole by each rank", sequence_parallel=True),
            **_ignored("it is read key by key (translate.py)", tensor_model_parallel_size=1, context_parallel_size=1),
        },
    },
    "SynchronizerConfig": {
        **_ignored("there is no collective group", group_name="rollout_weight_sync"),
        **_ignored("the pointer names only complete checkpoints", wait_for_checkpoint=False),
        **_derived("explorer_world_size", "ray_namespace"),
    },
    "MonitorConfig": {
        **_ignored("there is no Ray; see the Dask dashboard", enable_ray_timeline=False),
        **_derived("cache_dir"),
    },
    "TaskPipelineConfig": _missing("another place for what the pipeline makes; it is in the run folder, and the "
                                   "taskset reads it", output=None),
    "ExperiencePipelineConfig": {
        **_ignored("the experience log always keeps what the explorers made", save_input=True),
        **_missing("a copy of the input of operators; the experience log keeps it, see rftdask experiences",
                   input_save_path=None),
        **_missing("further inputs of operators", inputs={}),
        **_missing("an output of operators besides the ledger", output=None),
    },
    "LogConfig": {
        **_ignored("there is one log file for each role", group_by_node=False),
        **_derived("save_dir"),
    },
}
# fmt: on
"""Class of a section -> its keys without a field. A class has those of its bases, too, unless a field has the name."""

# fmt: off
REFERENCE_NAMES: Mapping[str, Mapping[str, str]] = {
    "workflow": {
        "agentscopev0_react_math_workflow": "it needs AgentScope before 1.0; use agentscope_react_math_workflow",
        "agentscope_v1_react_search_workflow": "it starts an MCP server by npx that searches the web; write it as a "
        "function with the tool of your choice, for agentscope_workflow_adapter_v1 (docs/workflows.md)",
        "email_search_workflow": "it reads a database of mails that its own script makes; bring it as a plug-in",
        "webshop_workflow": "it needs the package web_agent_site, which is not on PyPI; bring it as a plug-in",
        "intercode_sql_workflow": "it needs intercode-bench, Docker and MySQL; bring it as a plug-in",
        **dict.fromkeys(("RAFT_alfworld_workflow", "RAFT_reflect_alfworld_workflow"),
                        "it reads files that Trinity-RFT's package does not have, so it runs from its repository only"),
        "math_trainable_ruler_workflow": "its judge's answers would be a group of their own, and rows of a workflow "
        "are one rollout's; math_ruler_workflow has a judge that is not trained",
    },
    "reward function": {
        "rm_gallery_reward": "it is of Trinity-RFT before 0.6, and needs RM-Gallery; write a reward function",
    },
}
# fmt: on
"""Kind of a part (`Named.kind`) -> names that the reference system has and this package lacks, and what to do."""


@cache
def reference_keys(section: type) -> Mapping[str, ReferenceKey]:
    """The entries of a class of sections."""
    return {key: told for cls in section.__mro__ for key, told in REFERENCE_KEYS.get(cls.__name__, {}).items()}
