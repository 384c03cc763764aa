"""Promises about the keys of a configuration, compared with those of the reference system."""

import ast
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin

import pytest
from config_cases import another_value, config, grpo, problems, reachable, with_key
from pydantic.fields import FieldInfo

from rftdask.config import Config
from rftdask.config.base import Computed, Later, PluginName, Section, child_of, default_of, marks_of, plain
from rftdask.config.check import walk
from rftdask.config.schema import algorithm, buffer, cluster, explorer, model, optimizer, run, trainer
from rftdask.config.trinity.reference_keys import REFERENCE_KEYS as WITHOUT_FIELD
from rftdask.config.trinity.reference_keys import Derived, Ignored, Missing, Renamed, Secret
from rftdask.config.trinity.translate import MEGATRON, OF_THE_POLICY, REFUSED

KEYS = dict(walk(Config))
SCHEMAS = [algorithm, buffer, cluster, explorer, model, optimizer, run, trainer]
REFERENCE_KEYS: dict[str, object] = json.loads(
    Path(__file__).with_name("trinity").joinpath("trinity_keys.json").read_text()
)["keys"]
"""Every key of the reference system (Trinity-RFT 0.6.0) with its default; an item of a list is written name[]."""
COMPUTED = re.compile(
    r"(algorithm|buffer\.explorer_input\.\w*taskset.*)\.repeat_times"  # 1, and the algorithms' own defaults are dead
    r"|buffer\.explorer_input\..*\.(path|top_k)|model\.(model_path|max_model_len)|stages\[\]\.stage_name"
    r"|buffer\.train_batch_size|buffer\.trainer_input\..*\.(capacity|name|storage_type|priority_fn_args)"
)
"""The reference gives no default for these, or computes it."""

OUR_DEFAULTS: dict[str, object] = {
    "explorer.listen_address": "127.0.0.1",
    "explorer.proxy_port": 8000,
    # The same decay is the default of the priority function itself, and another function takes other arguments.
    "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args": {},
    "project": "rftdask",
    "checkpoint_root_dir": "./runs",
    "algorithm.algorithm_type": "grpo",
    "explorer.rollout_model.engine_type": "transformers",
    "explorer.auxiliary_models[].engine_type": "transformers",
    "explorer.rollout_model.dtype": "auto",
    "explorer.auxiliary_models[].dtype": "auto",
    # Filled: an auxiliary model shares the GPUs of the policy; in the reference each has its own engines.
    "explorer.rollout_model.engine_num": None,
    "explorer.auxiliary_models[].engine_num": None,
    "trainer.trainer_type": "torch",
    # There all are kept, until the disk is full.
    "trainer.max_checkpoints_to_keep": 5,
    "synchronizer.sync_method": "auto",
    # There a cosine ends at a hundredth of its peak; here, as that of transformers, at 0.
    "algorithm.optimizer.min_lr_ratio": 0.0,
    "algorithm.optimizer.clip_grad": None,  # filled: 1.0, together with trainer.grad_clip
    "trainer.grad_clip": None,
    # Filled: that of the run, so that another `seed` is another run.
    **{path: None for path in REFERENCE_KEYS if path.endswith(("selector.seed", "_model.seed", "_models[].seed"))},
    # Counts the batches of explore steps there, so that its default holds nobody back.
    "buffer.trainer_input.experience_buffer.capacity": None,
}
"""Key -> default, where ours differs from the reference's."""

OUR_KEYS = {
    "": "deterministic private seed",
    "buffer": "max_bad_rows",
    "algorithm.optimizer": "decay_all_weights lr_scheduler_args optimizer_args",
    "buffer.explorer_input.<taskset>": "dataset_args",
    "buffer.explorer_input.<taskset>.format": "label_key return_assistant_tokens_mask",
    "buffer.explorer_input.<taskset>.rollout_args": "final_temperature temperature_steps",
    "buffer.trainer_input.experience_buffer": "max_unread_bytes",
    "buffer.trainer_input.experience_buffer.format": "label_key return_assistant_tokens_mask",
    "buffer.trainer_input.experience_buffer.retention": "keep keep_fraction keep_steps",
    "cluster": "colocate dashboard_address interface local_cache_dir max_queue_s num_cpus options private_folder "
    "python stage_keep tls type",
    "cluster.slurm": "dependency heterogeneous mail profile template",
    "cluster.slurm.<role>": "account constraint cpus directives exclusive gpus_per_node gres memory nodes partition "
    "prologue qos reservation tasks_per_node walltime",
    "data_processor.experience_pipeline": "stage",
    "explorer": "max_commit_delay_s max_workers min_workers plugin_dirs slots_per_engine tasks_per_batch",
    "explorer.rollout_model": "max_retries prompt_price requests_per_minute response_price teacher_for "
    "tokens_per_minute",
    "explorer.sandbox": "bubblewrap bubblewrap_network max_memory_gb max_processes mode",
    "monitor": "extra_monitors",
    "synchronizer": "full_publish_interval load_in_flight max_staleness poll_interval_s",
    "trainer": "eval_interval gradient_checkpointing master_weights max_restarts micro_batch_size num_ranks ppo_epochs "
    "ppo_mini_batch_size prefetch_layers reshard_after_forward router_aux_loss_coef save_minutes tensor_parallel_size "
    "torch_compile",
    "trainer.critic": "cliprange_value lr",
}
"""Section -> keys of ours that the reference does not have."""

DERIVED_KEYS = [
    "checkpoint_job_dir",
    "model.lora_configs[].is_dummy",
    "cluster.total_gpu_num",
    "cluster.rollout_gpu_num",
    "cluster.auxiliary_model_gpu_num",
    "cluster.explorer_gpu_num",
    "cluster.trainer_gpu_num",
    "buffer.explorer_input.taskset.rollout_args.n",
    "buffer.trainer_input.experience_buffer.index",
    "buffer.trainer_input.experience_buffer.batch_size",
    "buffer.trainer_input.experience_buffer.tokenizer_path",
    "explorer.rollout_model.bundle_indices",
    "explorer.rollout_model.nnodes",
    "explorer.rollout_model.node_rank",
    "explorer.rollout_model.lora_modules",
    "explorer.rollout_model.lora_kwargs",
    "synchronizer.explorer_world_size",
]


def marked(kind: type) -> list[str]:
    """Return the paths of fields with such a mark, and of marked keys without a field."""
    return [path for path, key in KEYS.items() if any(isinstance(mark, kind) for mark in marks(path))]


def marks(path: str) -> list[object]:
    key = KEYS[path]
    return marks_of(key) if isinstance(key, FieldInfo) else [key]


def default(path: str) -> object:
    key = KEYS[path]
    return plain(default_of(key)) if isinstance(key, FieldInfo) else getattr(key, "default", None)


def is_leaf(path: str) -> bool:
    key = KEYS[path]
    return not child_of(key) if isinstance(key, FieldInfo) else not isinstance(key, dict)


def test_reference_keys_belong_to_sections_without_the_field() -> None:
    sections = {cls.__name__: cls for module in SCHEMAS for cls in vars(module).values() if isinstance(cls, type)}
    for name, keys in WITHOUT_FIELD.items():
        assert issubclass(sections[name], Section), name
        assert not set(keys) & set(sections[name].model_fields), name


@pytest.mark.parametrize("path", [path for path in REFERENCE_KEYS if path != "checkpoint_job_dir"])  # a property
def test_every_key_of_the_reference_is_known_and_has_its_default(path: str) -> None:
    expected = OUR_DEFAULTS.get(path, REFERENCE_KEYS[path])
    assert path in KEYS
    if not COMPUTED.fullmatch(path) and not is_not_settable(path) and hasattr(KEYS[path], "default"):
        assert (default(path) or None) == (expected or None) if expected in (None, "") else default(path) == expected


def test_every_key_of_ours_is_of_the_reference_or_listed_as_ours() -> None:
    ours: dict[str, set[str]] = {}
    of_verl = {f"trainer.{key}" for key in REFUSED}
    for path in KEYS.keys() - REFERENCE_KEYS.keys() - of_verl:
        if is_leaf(path) and reachable(path) and not is_not_settable(path):
            section, _, key = re.sub(r"(eval_)?tasksets?(\[\])?\.", "<taskset>.", path).rpartition(".")
            section = re.sub(r"(?<=slurm\.)(controller|trainer|explorer|auxiliary)", "<role>", section)
            ours.setdefault(section, set()).add(key)
    assert ours == {section: set(keys.split()) for section, keys in OUR_KEYS.items()}


def is_not_settable(path: str) -> bool:
    return isinstance(KEYS[path], Derived | Secret | Renamed)


@pytest.mark.parametrize(
    "path", [path for path in sorted(REFERENCE_KEYS.keys() & KEYS) if not COMPUTED.fullmatch(path) and reachable(path)]
)
def test_every_key_may_be_set_to_its_default(path: str) -> None:
    value = default(path)
    if path.endswith(".taskset"):
        value = {"path": "tasks.jsonl"}  # mode both needs one
    assert config(with_key(path, value)).warnings == ()


def test_the_top_level_sections_are_those_of_the_reference() -> None:
    sections = {path.split(".")[0].removesuffix("[]") for path in REFERENCE_KEYS if "." in path}
    assert sections <= {path.split(".")[0] for path in KEYS}


TRANSLATED = {
    "trainer.trainer_config",
    "trainer.megatron.expert_model_parallel_size",
    *(f"trainer.megatron.{key}" for key in MEGATRON),
    *(f"explorer.rollout_model.{key}" for key in OF_THE_POLICY),
}
"""Read in another way before keys are checked: test_translate.py."""


@pytest.mark.parametrize("path", [path for path in marked(Missing) if reachable(path) and path not in TRANSLATED])
def test_a_key_whose_feature_is_missing_is_refused_when_set(path: str) -> None:
    lines = problems(with_key(path, another_value(default(path))))
    where = path.replace("[]", "[0]")
    assert [line for line in lines if line.startswith(f"{where}: ") and "is not available in this release (" in line]


@pytest.mark.parametrize("key", ["model_path", "name"])
def test_the_policy_engine_has_no_model_path_or_name(key: str) -> None:
    [line] = problems(with_key(f"explorer.rollout_model.{key}", "other"))
    assert line.startswith(f"explorer.rollout_model.{key}: 'other' is not available in this release (")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (path, value)
        for path in marked(Later)
        for mark in marks(path)
        if isinstance(mark, Later) and reachable(path)
        for value in mark.values
    ],
)
def test_a_value_of_a_missing_feature_names_an_alternative(path: str, value: str) -> None:
    lines = problems(with_key(path, value))
    where = path.replace("[]", "[0]")
    assert [line for line in lines if line.startswith(f"{where}: {value!r} is not available in this release (")]
    assert any("; use " in line for line in lines)


@pytest.mark.parametrize("path", [path for path in marked(Ignored) if reachable(path) and path not in TRANSLATED])
def test_an_ignored_key_is_warned_about_once_with_the_reason(path: str) -> None:
    reason = KEYS[path].reason
    loaded = config(with_key(path, another_value(default(path))))
    where = path.replace("[]", "[0]")
    assert [line for line in loaded.warnings if line == f"{where}: ignored: {reason}"] == [
        f"{where}: ignored: {reason}"
    ]


@pytest.mark.parametrize("path", [path for path in dict.fromkeys([*DERIVED_KEYS, *marked(Derived)]) if reachable(path)])
def test_a_derived_key_cannot_be_set(path: str) -> None:
    assert problems(with_key(path, 8)) == [f"{path.replace('[]', '[0]')}: derived, cannot be set"]


def test_every_derived_key_is_marked_so() -> None:
    for path in DERIVED_KEYS[1:]:
        assert isinstance(KEYS[path], Derived), path


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in marked(Computed)
        if reachable(path) and "tasksets[]" not in path and path != "model.max_model_len"
    ],
)
def test_null_in_a_filled_key_means_that_it_is_computed(path: str) -> None:
    assert config(with_key(path, None)) == config(grpo())


@pytest.mark.parametrize("module", SCHEMAS, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_key_is_followed_by_its_meaning(module: ModuleType) -> None:
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, [*node.body[1:], None], strict=True)
            fields = [
                (a, b) for a, b in pairs if isinstance(a, ast.AnnAssign) and not ast.unparse(a.target).startswith("_")
            ]
            for field, after in fields:
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field.target)


@pytest.mark.project
def test_every_key_is_read_by_some_code() -> None:
    """A read is an attribute or a string with the name, so a key that shares its name with another one escapes."""
    code = [ast.parse(path.read_text()) for path in Path(run.__file__).parents[2].rglob("*.py")]
    nodes = [node for tree in code for node in ast.walk(tree)]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # The arguments of a part are read through the mark of the key that names it.
    read |= {mark.arguments for path in marked(PluginName) for mark in marks(path) if isinstance(mark, PluginName)}
    unread = {path for path in KEYS if path.rpartition(".")[2].removesuffix("[]") not in read}
    assert {path for path in unread if isinstance(KEYS[path], FieldInfo) and not has_one_value(KEYS[path])} == set()


def has_one_value(key: FieldInfo) -> bool:
    """True if any other value is refused or taken as this one."""
    return get_origin(key.annotation) is Literal and len(get_args(key.annotation)) == 1
