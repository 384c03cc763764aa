"""Promises of a rank's batches: sources and sizes as configured; a dropped row has a reason and no influence."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa
import torch
from hypothesis import given
from hypothesis import strategies as st

from rftdask.algorithm.advantages.base import AdvantageInputs
from rftdask.algorithm.compose import build_algorithm, make_algorithm, make_part
from rftdask.algorithm.drop_reasons import DropReason
from rftdask.buffer.batches.ledger import Ledger
from rftdask.buffer.log.columns import experiences_to_table
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.buffer.log.schema import Experience, Status
from rftdask.config import Config, load_config
from rftdask.config.plan import plan_work
from rftdask.data.tokenizer import load_tokenizer
from rftdask.driver.preflight import check_inputs
from rftdask.errors import DataError, UserError, WaitTimeout
from rftdask.models.toy import build_toy_model
from rftdask.storage import open_storage
from rftdask.trainer.rank import AlgorithmFilter, begins_with_sampler, build_source, read_held_out
from tests.unit.buffer.buffer_cases import experience

make_operator = partial(make_part, "operator")


def table(rewards: list[list[float]], **changes: dict[tuple[int, int], Any]) -> pa.Table:
    """Rows of groups of rollouts; `changes`: by field, its value for (task, rollout)."""
    rows = [
        Experience(
            **{
                "taskset": "t",
                "epoch": 0,
                "task_index": task,
                "rollout": k,
                "explore_step": 1,
                "tokens": (1, 2, 3),
                "prompt_length": 1,
                "rollout_logprobs": (-1.0, -1.0),
                "reward": reward,
                **{name: values[task, k] for name, values in changes.items() if (task, k) in values},
            }
        )
        for task, group in enumerate(rewards)
        for k, reward in enumerate(group)
    ]
    return experiences_to_table(rows)


def curation(
    name: str = "grpo", *operators: tuple[str, dict[str, Any]], baseline: int | None = None, **parts: Any
) -> AlgorithmFilter:
    return AlgorithmFilter(make_algorithm(name, **parts), [make_operator(n, a) for n, a in operators], baseline)


def test_most_algorithms_drop_nothing() -> None:
    assert curation("grpo").reasons(table([[1.0, 1.0], [0.0]]), 1) == ["", "", ""]
    assert curation("sft").rewards(table([[1.0, 0.5]])).tolist() == [1.0, 0.5]


def test_dapo_drops_tasks_without_a_difference() -> None:
    assert curation("dapo").reasons(table([[1.0, 1.0], [1.0, 0.0]]), 1) == ["low_std", "low_std", "", ""]


def test_operators_come_before_the_algorithm_in_their_order() -> None:
    operators = [("reward_filter", {"threshold": 0.5}), ("reward_std_filter", {})]
    reasons = curation("grpo", *operators).reasons(table([[1.0, 0.0, 0.8], [1.0, 1.0, 0.2]]), 1)
    assert reasons == ["", "reward_range", "", "low_std", "low_std", "reward_range"]
    reasons = curation("dapo", ("reward_filter", {"threshold": 0.5})).reasons(table([[1.0, 0.0, 1.0]]), 1)
    assert reasons == ["low_std", "reward_range", "low_std"], "what an operator dropped makes no difference any more"


def test_operators_see_truncation_and_metrics() -> None:
    statuses = {(0, 1): Status.TRUNCATED}
    metrics = {
        (0, 0): {"accuracy": 1.0},
        (0, 1): {"accuracy": 0.0},
        (1, 0): {"accuracy": 1.0},
        (1, 1): {"accuracy": 1.0},
    }
    rows = table([[5.0, 5.0], [1.0, 0.0]], status=statuses, metrics=metrics)
    masking = curation("grpo", ("mask_response_truncated", {}))
    assert masking.reasons(rows, 1) == [""] * 4, "its reward is a part of the baseline"
    assert masking.masked(rows).tolist() == [False, True, False, False]
    assert masking.masked(rows.slice(1, 1)).tolist() == [True], "whatever rows are there"
    assert not curation("grpo").masked(rows).any()
    assert curation("grpo", ("dapo_dynamic_sampling", {})).reasons(rows, 1) == ["", "", "low_std", "low_std"]


def test_shaped_rewards_are_trained_and_seen_by_operators() -> None:
    shaping = (
        "reward_shaping_mapper",
        {"reward_shaping_configs": [{"stats_key": "bonus", "op_type": "ADD", "weight": 2.0}]},
    )
    rows = table([[0.0, 0.0]], metrics={(0, 1): {"bonus": 0.5}})
    curated = curation("dapo", shaping, ("reward_filter", {"threshold": -1.0}))
    assert curated.rewards(rows).tolist() == [0.0, 1.0]
    assert curated.rewards(rows.slice(1, 1)).tolist() == [1.0], "whatever rows are left"
    assert curated.reasons(rows, 1) == ["", ""], "they differ by what was added"


def test_groups_without_their_greedy_baseline_are_dropped() -> None:
    rows = table([[1.0, 0.0], [1.0]])
    assert curation("remax", baseline=1).reasons(rows, 1) == ["", "baseline", "no_baseline"]


def test_raft_keeps_good_enough_best_rollouts() -> None:
    rows = table([[0.5, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.2]])
    rest = "not_best"
    assert curation("raft").reasons(rows, 1) == [rest, "", rest, rest, rest, rest, rest, ""], "of equals the first"
    strict = curation("raft", advantage_fn_args={"threshold": 0.5})
    assert strict.reasons(rows, 1) == [rest, "", rest, *["reward_range"] * 5]
    every = curation("raft", advantage_fn_args={"best": None, "threshold": 0.5})
    assert every.reasons(rows, 1) == ["", "", "", *["reward_range"] * 5]
    with pytest.raises(UserError, match="best and threshold are both None"):
        curation("raft", advantage_fn_args={"best": None})


def test_rec_drops_surplus_negatives_by_step() -> None:
    rows = table([[0.0] * 7 + [1.0]])
    parts: dict[str, Any] = {"advantage_fn_args": {"drop": "balance"}}
    reasons = [curation("rec", **parts).reasons(rows, step) for step in (1, 1, 2)]
    assert reasons[0] == reasons[1] != reasons[2]
    assert [r.count("surplus_negative") for r in reasons] == [6, 6, 6]
    assert reasons[0][7] == ""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dapo", {}),
        ("raft", {"advantage_fn_args": {"best": 2, "threshold": 0.3}}),
        ("rec", {"advantage_fn_args": {"drop": "balance", "std_normalize": True}}),
        ("multi_step_grpo", {"advantage_fn_args": {"std_threshold": 0.2}}),
    ],
)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_remaining_rows_keep_their_advantages(name: str, parts: dict[str, Any], rewards: list[list[float]]) -> None:
    algorithm = make_algorithm(name, **parts)
    groups = torch.tensor([task for task, group in enumerate(rewards) for _ in group])
    values = torch.tensor([reward for group in rewards for reward in group])
    inputs = AdvantageInputs(rewards_N=values, group_N=groups, step=3)
    whole = algorithm.compute_advantages(inputs)
    kept = whole.drops_N == DropReason.KEPT
    rest = AdvantageInputs(rewards_N=values[kept], group_N=groups[kept], step=3)
    again = algorithm.without_filtering().compute_advantages(rest)
    assert bool((again.drops_N == DropReason.KEPT).all())
    np.testing.assert_allclose(again.advantages_N, whole.advantages_N[kept], atol=1e-6)


_BATCH = """
import sys
from rftdask.storage import open_storage
from tests.unit.buffer.buffer_cases import batch_of, make_source
from tests.unit.trainer.test_rank_batch import curation
_, batch = batch_of(make_source(open_storage(sys.argv[1]), batch_filter=curation("dapo")), 1)
print(batch.rewards.tolist(), "pandas" in sys.modules)
"""


@pytest.mark.slow
def test_a_rank_imports_no_pandas_for_its_first_batch(tmp_path: Path) -> None:
    rows = [experience(task, k, reward=float(task * k)) for task in range(2) for k in range(2)]
    ParquetLog(open_storage(str(tmp_path))).commit(rows, explore_step=1, unit=0)
    done = subprocess.run(
        [sys.executable, "-c", _BATCH, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[0.0, 1.0] False", "of two groups one is flat, and dropped"


RAW = {"prompt_type": "raw"}
VLLM = "explorer.rollout_model.engine_type=vllm"
ROWS = [{"prompt": f"{n}", "response": "!"} for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_toy_model(folder, num_layers=1)
    return folder


def config(
    folder: Path, model: Path, algorithm: str = "sft", buffer: dict[str, Any] | None = None, **section: Any
) -> Config:
    return load_config(
        {
            "mode": "train",
            "checkpoint_root_dir": str(folder / "runs"),
            "model": {"model_path": str(model), "max_model_len": 64},
            "algorithm": {"algorithm_type": algorithm},
            "buffer": {"batch_size": 2, "trainer_input": {"experience_buffer": section}, **(buffer or {})},
        }
    )


def batches(stage: Config) -> list[list[str]]:
    """Texts of the sequences, by batch."""
    source = build_source(stage, open_storage(stage.checkpoint_job_dir), build_algorithm(stage))
    tokenizer = load_tokenizer(stage)
    found: list[list[str]] = []
    while (entry := source.entry(len(found) + 1)) is not None:
        batch = source.read(entry)
        ends = np.cumsum(batch.lengths)
        rows = np.split(batch.tokens, ends[:-1])
        found.append([tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows])
    return found


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_rows_come_from_the_split_and_subset_of_the_path(tmp_path: Path, model: Path) -> None:
    for name, prompt in (("easy/train", "a"), ("easy/test", "b"), ("hard/train", "c"), ("hard/test", "d")):
        write(tmp_path / "data" / f"{name}.jsonl", [{"prompt": prompt, "response": f"{n}"} for n in range(2)])
    section: dict[str, Any] = {"path": str(tmp_path / "data"), "subset_name": "hard", "split": "test", "format": RAW}
    assert batches(config(tmp_path, model, **section)) == [["d0", "d1"]]


@pytest.mark.parametrize("chosen", [{"subset_name": "sums"}, {"name": "sums"}])
def test_a_table_is_the_subset_or_else_the_name(tmp_path: Path, model: Path, chosen: dict[str, str]) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in ("sums", "others"):
            connection.exec_driver_sql(f"create table {table} (id integer primary key, prompt text, response text)")
            connection.exec_driver_sql(f"insert into {table} values (1, '{table}', '1'), (2, '{table}', '2')")
    engine.dispose()
    section: dict[str, Any] = {"path": url, "storage_type": "sql", "format": RAW, **chosen}
    assert batches(config(tmp_path, model, **section)) == [["sums1", "sums2"]]


def test_columns_are_those_that_the_format_names(tmp_path: Path, model: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"q": f"{n}", "a": "!", "worse": "?"} for n in range(2)])
    columns = {**RAW, "prompt_key": "q", "response_key": "a"}
    assert batches(config(tmp_path, model, path=str(file), format=columns)) == [["0!", "1!"]]
    columns = {**RAW, "prompt_key": "q", "chosen_key": "a", "rejected_key": "worse"}
    found = batches(config(tmp_path / "dpo", model, "dpo", path=str(file), format=columns))
    assert found == [["0!", "0?", "1!", "1?"]]


def test_chats_and_tools_come_from_the_named_columns(tmp_path: Path, model: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [{"chat": chat, "functions": [{"name": "add"}]}] * 2
    tools = tmp_path / "template.jinja"
    tools.write_text(
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    stage = config(
        tmp_path,
        model,
        path=str(write(tmp_path / "rows.jsonl", rows)),
        format={"messages_key": "chat", "tools_key": "functions"},
    )
    stage = load_config(stage.to_dict(), [f"model.chat_template_path={tools}"])
    assert batches(stage) == [["[add]<hi><yo>"] * 2]


def test_a_shuffle_has_the_order_of_its_seed(tmp_path: Path, model: Path) -> None:
    path = str(write(tmp_path / "rows.jsonl", ROWS))
    orders = []
    for number, selector in enumerate(
        ({"selector_type": "sequential"}, *({"selector_type": "shuffle", "seed": seed} for seed in (1, 2, 1)))
    ):
        stage = config(tmp_path / str(number), model, path=path, format=RAW, data_selector=selector)
        orders.append([text for batch in batches(stage) for text in batch])
    assert orders[0] == [f"{n}!" for n in range(6)]
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[1] == orders[3] and len({tuple(order) for order in orders}) == 3


def test_the_sizes_of_the_buffer_cut_the_dataset(tmp_path: Path, model: Path) -> None:
    section: dict[str, Any] = {"path": str(write(tmp_path / "rows.jsonl", ROWS)), "format": RAW}
    sizes = [
        [len(batch) for batch in batches(config(tmp_path / str(number), model, buffer=buffer, **section))]
        for number, buffer in enumerate(({"batch_size": 3}, {"train_batch_size": 4}, {"total_epochs": 2}))
    ]
    assert sizes == [[3, 3], [4], [2] * 6]


def test_the_steps_of_the_buffer_decide_in_place_of_its_epochs(tmp_path: Path, model: Path) -> None:
    section: dict[str, Any] = {"path": str(write(tmp_path / "rows.jsonl", ROWS)), "format": RAW}
    stage = config(tmp_path, model, buffer={"batch_size": 4, "total_steps": 2}, **section)
    assert [text for batch in batches(stage) for text in batch] == [f"{n}!" for n in (0, 1, 2, 3, 4, 5, 0, 1)]
    assert plan_work(stage, {"dataset": len(ROWS)}).train_steps == 2
    [inputs] = check_inputs([load_config(stage.to_dict(), ["buffer.batch_size=8", "buffer.train_batch_size=8"])])
    assert inputs.sizes == {"dataset": len(ROWS)}


@pytest.mark.parametrize(
    ("overrides", "is_compared"),
    [
        ([], True),
        (["explorer.rollout_model.engine_type=fake"], False),
        ([VLLM], True),
        ([VLLM, "explorer.rollout_model.extra_engine_args={quantization: fp8}"], False),
        ([VLLM, "explorer.rollout_model.extra_engine_args={kv_cache_dtype: fp8}"], False),
    ],
)
def test_first_rollouts_are_compared_if_engines_round_little(
    tmp_path: Path, model: Path, overrides: list[str], is_compared: bool
) -> None:
    stage = load_config(config(tmp_path, model, "grpo").to_dict(), overrides)
    assert begins_with_sampler(stage, open_storage(stage.checkpoint_job_dir)) == is_compared


def test_rollouts_are_not_compared_after_an_accepted_change(tmp_path: Path, model: Path) -> None:
    stage = config(tmp_path, model, "grpo")
    storage = open_storage(stage.checkpoint_job_dir)
    storage.put("control/accepted-1.json", json.dumps({"changes": ["model: content changed"]}).encode())
    assert not begins_with_sampler(stage, storage)


def test_a_replay_is_not_compared_with_its_rollouts(tmp_path: Path, model: Path) -> None:
    storage = open_storage(tmp_path / "lineages" / "half-lr")
    storage.put("parent.json", json.dumps({"name": "half-lr", "lineage": "main", "step": 0}).encode())
    assert not begins_with_sampler(config(tmp_path, model, "grpo"), storage)


def test_waiting_too_long_for_experiences_raises(tmp_path: Path, model: Path) -> None:
    stage = config(tmp_path, model, "grpo", max_read_timeout=0.05)
    source = build_source(stage, open_storage(stage.checkpoint_job_dir), build_algorithm(stage))
    with pytest.raises(WaitTimeout, match="max_read_timeout"):
        source.entry(1, patience_s=1.0)


def test_rows_without_use_are_dropped_with_their_reason(tmp_path: Path, model: Path) -> None:
    rows = [ROWS[0], {"prompt": "7", "response": None}, {"prompt": "x" * 99, "response": "!"}, ROWS[1]]
    path = write(tmp_path / "rows.jsonl", rows)
    stage = config(tmp_path, model, path=str(path), format=RAW)
    assert [len(batch) for batch in batches(stage)] == [1, 1]
    first, second = dropped(stage, 1), dropped(stage, 2)
    assert first == [f"bad_row: dataset {path}: row 1: column 'response' holds NoneType, not text"]
    assert "row 2: the prompt has 64 tokens, so nothing of the response fits in 64" in second[0]


def test_a_chat_that_the_template_refuses_is_dropped(tmp_path: Path, model: Path) -> None:
    answer = {"role": "assistant", "content": "4"}
    chats = [[{"role": role, "content": "2+2?"}, answer] for role in ("user", "tool")]
    path = write(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template += "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    stage = config(tmp_path, model, path=str(path), format={"messages_key": "messages"})
    stage = load_config(stage.to_dict(), [f"model.custom_chat_template={json.dumps(template)}"])
    assert batches(stage) == [["2+2?4"]]
    assert "row 1: the chat template cannot render it: TemplateError: no tools" in dropped(stage, 1)[0]


def dropped(stage: Config, step: int) -> list[str]:
    """Reasons of the rows that a step drops."""
    entry = Ledger(open_storage(stage.checkpoint_job_dir)).read(step)
    return [] if entry is None else [rows.reason for rows in entry.drop]


@pytest.mark.parametrize("max_bad_rows", [0, 1])
def test_held_out_rows_without_use_are_left_out(tmp_path: Path, model: Path, max_bad_rows: int) -> None:
    path = write(tmp_path / "rows.jsonl", [*ROWS[:3], {"prompt": "7", "response": None}])
    section: dict[str, Any] = {"path": str(path), "format": RAW}
    stage = config(tmp_path, model, **section)
    buffer = {**stage.to_dict()["buffer"], "max_bad_rows": max_bad_rows}
    buffer["trainer_input"] = {"experience_buffer": section, "eval_buffer": section}
    stage = load_config({**stage.to_dict(), "buffer": buffer})
    if max_bad_rows:
        assert [len(batch) for batch in read_held_out(stage)] == [2, 1]
        return
    with pytest.raises(DataError, match=r"row 3: column 'response' holds NoneType.*; held-out rows with errors: 1"):
        read_held_out(stage)
