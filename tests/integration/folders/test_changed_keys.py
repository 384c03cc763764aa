"""Promise: a key that a later start may change (`MayChange`) changes no bit of what is trained, or the rounding."""

import re
from pathlib import Path
from typing import Any

from rftdask import Experiment
from rftdask.config import Config, load_config, replace
from rftdask.config.base import MayChange
from rftdask.config.check import walk
from rftdask.config.trinity.translate import leaves
from tests.e2e.toy_runs import run_folder, write_grpo_config
from tests.integration.run_cases import final_weights, ledger_of

STEPS = 4
CHANGED: dict[str, Any] = {
    "continue_from_checkpoint": True,
    "private": True,
    "log": {"level": "DEBUG"},
    "monitor": {"detailed_stats": True},
    "cluster": {"num_cpus": 3},
    "service": {"data_juicer": {"server_url": "http://localhost:5005"}},
    "model": {"external_model": {"base_url_env": "URL", "api_key_env": "KEY"}, "tinker": {"base_url": "http://here"}},
    "buffer": {
        **{"total_epochs": 9, "total_steps": STEPS + 2, "max_bad_rows": 1},
        "explorer_input": {"default_eval_workflow_type": "math_workflow"},
        "trainer_input": {
            "experience_buffer": {
                **{"capacity": 400, "max_unread_bytes": 10**8, "max_read_timeout": 900.0},
                "retention": {"keep": "compact"},
            }
        },
    },
    "explorer": {
        **{"name": "second", "min_workers": 2, "max_workers": 2, "max_commit_delay_s": 0.001},
        **{"max_timeout": 900.0, "max_retry_times": 1, "env_vars": {"OF_THE_RUN": "1"}, "eval_interval": 7},
        **{"eval_on_startup": False, "bench_on_latest_checkpoint": True},
        **{"listen_address": "127.0.0.2", "proxy_port": 0},
        "over_rollout": {"wait_after_min": 9.0},
        # Without max_processes, which decides which requests share a call, and thus the rounding.
        "sandbox": {"mode": "always", "max_memory_gb": 8.0},
        "rollout_model": {
            **{"engine_num": 2, "gpu_memory_utilization": 0.5, "enforce_eager": True},
            **{"enable_prefix_caching": False, "enable_chunked_prefill": False},
        },
    },
    "trainer": {
        **{"name": "learner", "max_restarts": 1, "gradient_checkpointing": True, "reshard_after_forward": False},
        **{"prefetch_layers": 1, "save_interval": 1, "save_minutes": 0.0, "eval_interval": 1, "total_steps": STEPS},
        **{"save_hf_checkpoint": "always", "max_checkpoints_to_keep": 2, "save_strategy": "single_thread"},
        "trainer_strategy": "ddp",
    },
    "synchronizer": {"sync_method": "memory", "sync_timeout": 900.0, "poll_interval_s": 0.01},
}
"""A later start of the run, with another value of each key that it can have."""
NOT_HERE = {
    **dict.fromkeys(("mode", "stages", "checkpoint_root_dir"), "make other runs of the same steps"),
    **dict.fromkeys(
        ("num_ranks", "tensor_parallel_size", "ulysses_sequence_parallel_size", "offload_policy", "torch_compile"),
        "test_ranks_agree.py and test_compiled_layers.py: equal up to rounding",
    ),
    **dict.fromkeys(("micro_batch_size", "max_token_len_per_gpu", "use_dynamic_bsz"), "equal up to rounding"),
    **dict.fromkeys(
        ("data_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"), "vLLM: equal up to rounding"
    ),
    **dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_retries"), "pace of models behind an API"),
    **dict.fromkeys(("prompt_price", "response_price"), "cost of auxiliary models"),
    "dynamic_timeout": "refused in style fixed",
    "num_process": "speed of the pipeline that made the dataset",
    **dict.fromkeys(("eval_tasksets", "eval_buffer"), "evaluations"),
    "full_publish_interval": "test_delta_steps.py",
}
"""Key -> reason why CHANGED lacks it."""


def test_keys_that_may_change_change_no_bit(tmp_path: Path) -> None:
    marked = [key for key, info in walk(Config) if MayChange() in getattr(info, "metadata", ())]
    tried = list(leaves(CHANGED))
    for key in marked:
        if not re.search(r"[\[<]|eval_buffer\.", key):  # keys of classes that are also sections above
            is_tried = any(f"{path}.".startswith(f"{key}.") for path, _ in tried)
            assert is_tried is not (key.rpartition(".")[2] in NOT_HERE), key

    undisturbed = write_grpo_config(tmp_path / "undisturbed", trainer={"total_steps": STEPS})
    assert Experiment.from_yaml(undisturbed).run(progress="none").status == "finished"
    config = write_grpo_config(tmp_path / "changed", trainer={"total_steps": STEPS // 2})
    assert Experiment.from_yaml(config).run(progress="none").status == "finished"
    began = load_config(config)
    later = replace(began, dict(tried))
    was, now = dict(leaves(began.to_dict())), dict(leaves(later.to_dict()))
    assert [path for path, _ in tried if was.get(path) == now[path]] == ["continue_from_checkpoint"]
    assert Experiment(later).run(progress="none").status == "finished"
    assert ledger_of(run_folder(config)) == ledger_of(run_folder(undisturbed))
    assert final_weights(run_folder(config)) == final_weights(run_folder(undisturbed))
