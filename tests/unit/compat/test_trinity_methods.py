"""Promise: each public method of Trinity-RFT's Trainer, Explorer and Synchronizer has a documented replacement whose
named test exists (docs/trinity-methods.md). tests/unit/config/trinity/test_from_trinity.py covers the keys.

`python tests/unit/compat/test_trinity_methods.py > docs/trinity-methods.md` writes the page again.
"""

import ast
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAINER = "tests/unit/trainer/test_trainer.py::"
CHECKPOINT = "tests/unit/trainer/test_checkpoint.py::"
EXPLORER = "tests/unit/explorer/test_explorer.py::"
CLAIMS = "tests/unit/explorer/test_unit_claims.py::"
EVALUATION = "tests/unit/explorer/test_evaluation.py::"
STYLES = "tests/unit/synchronizer/test_styles.py::"
ACTOR = "tests/unit/synchronizer/test_actor.py::"
PUBLISHED = "tests/unit/synchronizer/test_published.py::"
HELD = "tests/unit/synchronizer/transports/test_memory.py::"
METHODS = "tests/integration/weights/test_weight_methods.py::"
GROUP = METHODS + "test_all_machines_serve_all_versions_even_after_joining_late"
LOST_MEMBER = METHODS + "test_a_killed_process_loses_no_weights"
NO_GROUP = "nothing to call: a group exists for one broadcast on request; a lost member costs only that group"
NO_STATUS = "nothing to set: files show the progress of each role, and its lease whether it is alive"
LEASE = "tests/unit/run/test_lease.py::test_a_second_living_holder_is_refused"
STOP = TRAINER + "test_a_stop_on_request_ends_after_the_step_with_a_checkpoint"
DUE = TRAINER + "test_weights_are_published_when_due_and_at_the_end"
NEWEST = PUBLISHED + "test_the_pointer_names_the_published_version"
HERE: dict[str, dict[str, tuple[str, str]]] = {
    "Trainer": {
        "prepare": (
            "the gang starts its ranks, which resume",
            TRAINER + "test_a_checkpoint_holds_everything_a_new_process_needs",
        ),
        "train": ("`Trainer.run`", TRAINER + "test_a_run_trains_the_whole_log_and_saves_the_result"),
        "train_step": (
            "one iteration of `Trainer.run`",
            TRAINER + "test_a_step_reads_trains_publishes_saves_then_records",
        ),
        "train_step_num": (
            "the number of the newest ledger entry",
            TRAINER + "test_a_run_that_is_done_does_nothing_when_started_again",
        ),
        "need_sync": ("`SyncRules.publish_due`", STYLES + "test_the_trainer_publishes_at_intervals_or_on_request"),
        "need_save": (
            "`trainer.save_interval`, `save_minutes`",
            TRAINER + "test_timed_checkpoints_are_saved_and_removed",
        ),
        "sync_weight": ("`Publisher.publish`: files, manifest, pointer", DUE),
        "save_checkpoint": (
            "`global_step_<N>/`, complete with its manifest",
            CHECKPOINT + "test_a_save_that_is_killed_leaves_the_one_before",
        ),
        "shutdown": ("`Experiment.stop`, Ctrl-C, `rftdask cancel`", STOP),
        "is_alive": ("the lease of the role, in `rftdask status`", LEASE),
        "get_actor": (
            "no actor: ranks are child processes of Dask workers",
            "tests/unit/trainer/test_gang.py::test_ranks_run_on_trainer_workers_and_rank_0_ends_the_run",
        ),
        "get_weight_sync_info": (NO_GROUP, GROUP),
        "setup_weight_sync_group": (NO_GROUP, GROUP),
        "teardown_weight_sync_group": (NO_GROUP, LOST_MEMBER),
    },
    "Explorer": {
        "prepare": (
            "`Explorer.open`; engines warm up in tasks",
            EXPLORER + "test_a_joining_worker_receives_units_once_warm",
        ),
        "explore": ("`Explorer.run`", EXPLORER + "test_units_are_submitted_once_in_order_within_the_window"),
        "explore_step": (
            "work units of a step; steps overlap",
            EXPLORER + "test_a_unit_waits_for_the_steps_that_train_its_weights",
        ),
        "finish_current_steps": (
            "nothing to call: counters decide, and no step is drained",
            STYLES + "test_no_style_deadlocks",
        ),
        "need_sync": ("`SyncRules.takes_newest_at`", STYLES + "test_new_weights_are_taken_at_boundaries_or_always"),
        "need_eval": ("`EvaluationQueue.add_due`", EVALUATION + "test_versions_are_due_at_start_interval_and_end"),
        "eval": (
            "work units, in parallel with training",
            EXPLORER + "test_evaluations_take_half_of_the_engines_during_training",
        ),
        "benchmark": ("`mode: bench`", EVALUATION + "test_bench_evaluates_its_versions"),
        "save_checkpoint": (
            "nothing to save: the log records finished units",
            EXPLORER + "test_a_restarted_explorer_runs_only_missing_units",
        ),
        "sync_weight": (
            "`SyncRules.weights_for`; a worker loads what its unit names",
            STYLES + "test_fixed_runs_each_step_with_one_known_version",
        ),
        "get_weight": ("the verified files of a version", METHODS + "test_a_run_over_machines_trains_the_same"),
        "set_state_dict_meta": ("the manifest of a version", NEWEST),
        "setup_model_level_weight_sync_group": (NO_GROUP, GROUP),
        "setup_weight_sync_group": (NO_GROUP, GROUP),
        "teardown_weight_sync_group": (NO_GROUP, LOST_MEMBER),
        "serve": (
            "`rftdask serve`, `mode: serve`",
            "tests/integration/roles/test_served_runs.py::test_newer_weights_are_served_and_turns_record_their_version",
        ),
        "shutdown": (
            "`Experiment.stop`, Ctrl-C, `rftdask cancel`",
            "tests/integration/roles/test_stopped_runs.py::test_a_stopped_run_writes_a_checkpoint_and_can_continue",
        ),
        "is_alive": (
            "the lease of its name, in `rftdask status`",
            CLAIMS + "test_the_claim_of_an_ended_explorer_is_taken_over_once",
        ),
        "get_actor": (
            "no actor: a loop in the command; several have names",
            CLAIMS + "test_two_explorers_submit_each_unit_once",
        ),
    },
    "Synchronizer": {
        "add_module": (NO_STATUS, LEASE),
        "set_trainer_status": (NO_STATUS, LEASE),
        "set_explorer_status": (NO_STATUS, LEASE),
        "trainer_requires_weight_sync": (
            "`SyncRules.publish_due`",
            STYLES + "test_the_trainer_publishes_at_intervals_or_on_request",
        ),
        "explorer_requires_sync": ("`request_version`", PUBLISHED + "test_the_requested_version_is_read_back"),
        "set_model_state_dict": (
            "`Publisher.publish`; with `sync_method: memory` the ranks hold the weights",
            HELD + "test_in_memory_files_equal_stored_files",
        ),
        "get_model_state_dict": ("`EngineClient.fetch`: verified files, once per machine", GROUP),
        "get_model_state_dict_iterator": ("the same; files are read in parts", GROUP),
        "get_state_dict_meta": ("the manifest of a version", NEWEST),
        "setup_weight_sync_group": (NO_GROUP, GROUP),
        "coordinate_weight_sync_setup": (NO_GROUP, GROUP),
        "coordinate_weight_sync_teardown": (NO_GROUP, LOST_MEMBER),
        "wait_new_model_state_dict": (
            "`SyncHandle.wait_for_version`, with a deadline",
            ACTOR + "test_the_deadline_error_names_the_missing_version",
        ),
        "notify_no_new_model_state_dict": (
            "the end of the trainer wakes the explorer",
            STYLES + "test_no_style_deadlocks",
        ),
        "get_latest_model_version": ("`latest_published`, by the pointer", NEWEST),
        "get_latest_model_path": ("the same", NEWEST),
        "ready_to_nccl_sync": ("nothing to call: a version is ready once its manifest exists", LOST_MEMBER),
        "get_actor": (
            "`start_synchronizer`; without it the files are polled",
            ACTOR + "test_a_lost_actor_only_costs_time",
        ),
    },
}
"""Class -> method of the wheel 0.6.0 -> (replacement here, test of it)."""
FILES = {"Trainer": "trainer/trainer.py", "Explorer": "explorer/explorer.py", "Synchronizer": "manager/synchronizer.py"}


def page() -> str:
    lines = [
        "# Methods of Trinity-RFT",
        "",
        "Methods that Trinity-RFT's guides on trainer, explorer and synchronizer call, the replacement of",
        "each in rftdask, and a test that shows it. [trinity-keys.md](trinity-keys.md) lists the keys,",
        "[from-trinity.md](from-trinity.md) explains how to run a file. This page is written by",
        "tests/unit/compat/test_trinity_methods.py, which also checks that the tests exist.",
    ]
    for kind, methods in HERE.items():
        lines += ["", f"## {kind}", "", "| there | here | shown by |", "|---|---|---|"]
        lines += [f"| `{name}` | {here} | {test.replace('::', ' `')}` |" for name, (here, test) in methods.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kind", HERE)
def test_every_test_that_is_named_exists(kind: str) -> None:
    for method, (_, named) in HERE[kind].items():
        file, _, test = named.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert test in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, f"{kind}.{method}: {named}"


def test_the_page_of_methods_is_of_today() -> None:
    advice = "stale; write it again: python tests/unit/compat/test_trinity_methods.py > docs/trinity-methods.md"
    assert (ROOT / "docs/trinity-methods.md").read_text() == page(), advice


@pytest.mark.parametrize("kind", HERE)
def test_every_public_method_of_its_wheel_is_listed(kind: str) -> None:
    try:
        wheel = distribution("trinity-rft")
    except PackageNotFoundError:
        pytest.skip("trinity-rft is not installed; tests/conformance/install_peers.sh does it")
    tree = ast.parse(Path(str(wheel.locate_file(f"trinity/{FILES[kind]}"))).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    methods = [each.name for each in found.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {name for name in methods if not name.startswith("_")} == HERE[kind].keys()


if __name__ == "__main__":
    print(page(), end="")
