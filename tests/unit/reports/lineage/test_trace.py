"""Trace of one experience. Promises: it shows the weights, the step and its results, or the reason why no step used the
experience; missing files are reported as missing; for an unknown uid it lists the nearest ones.
"""

from dataclasses import replace

import pytest
from lineage_cases import Case, conversation, experience

from rftdask import Experiment
from rftdask.buffer.batches.ledger import Ledger, LedgerEntry, Rows
from rftdask.buffer.log.file_log import ParquetLog
from rftdask.errors import DataError
from rftdask.reports.lineage.trace import Evaluation, nearest_uids, trace


def lines_of(case: Case, uid: str) -> list[str]:
    return [" ".join(line.split()) for line in trace(case.url, uid).render().splitlines()]


def test_a_trained_experience_shows_its_step_and_results(case):
    traced = trace(case.url, "sums/0/2/1/0")
    (copy,) = traced.copies
    assert (traced.stage, copy.shard, copy.row, copy.state, copy.reason) == ("run", case.second, 1, "trained", "")
    (use,) = copy.uses
    assert (use.step, use.lineage, use.place, use.batch_rows) == (2, "main", 1, 3)
    assert use.metrics == {"loss": 0.25, "reward": 1 / 3, "dropped/total": 1.0}
    assert use.checkpoint is not None and use.checkpoint[:2] == (2, "global_step_2")
    before, after = Evaluation(0, "held_out", 0.1, 0.1), Evaluation(2, "held_out", 0.9, 0.9)
    assert use.evaluations == ((before, after),)


def test_trace_text_runs_from_prompt_to_evaluation(case):
    lines = lines_of(case, "sums/0/2/1/0")
    assert lines[0] == "sums/0/2/1/0 (stage run)"
    assert "response C1" in lines
    assert "sampled explore step 1, batch 1, by writer aaaaaaaaaaaa" in lines
    assert "temperature 1, top_p 1, top_k off, seed 7" in lines
    assert "1 prompt tokens, 2 response tokens, mean logprob -1.500" in lines
    assert "hash 0123456789abcdef: the model the stage began with, tiny" in lines
    assert "trained step 2, row 2 of 3 (lineage main), staleness 1" in lines
    assert "loss 0.25, reward 0.3333" in lines
    assert "evaluation held_out: accuracy 0.1 at version 0 -> 0.9 at version 2" in lines
    assert lines[-2:] == ["sums/0/2/0/0 0 ok trained C0", "* sums/0/2/1/0 1 ok trained C1"]


def test_show_a_conversation_turn_by_turn(case):
    ParquetLog(case.storage).commit([conversation(6)], explore_step=3, unit=0)
    lines = lines_of(case, "sums/0/6/0/0")
    begin = lines.index("prompt ?")
    assert lines[begin : begin + 4] == ["prompt ?", "turn 0 Hi", "tool <2+2=4>", "turn 1 4"]
    added = "7 tokens added between turns"
    assert f"1 prompt tokens, 3 response tokens, mean logprob -1.000, {added}" in lines


def test_show_the_tokens_sampled_by_each_policy_version(case):
    turn_by_turn = replace(
        conversation(6), min_policy_version=1, max_policy_version=3, version_starts=((0, 1), (1, 2), (9, 3))
    )
    first, last = turn_by_turn.turns
    turns = (
        replace(first, min_policy_version=1, max_policy_version=2),
        replace(last, min_policy_version=3, max_policy_version=3),
    )
    unrecorded = experience(6, 1, explore_step=3, max_policy_version=3)
    ParquetLog(case.storage).commit([replace(turn_by_turn, turns=turns), unrecorded], explore_step=3, unit=0)
    line = "weights policy version 1 to 3: 1 (tokens 0 to 0), 2 (tokens 1 to 1), 3 (tokens 9 to 9)"
    assert line in lines_of(case, "sums/0/6/0/0")
    assert "weights policy version 0 to 3: the version of each token is not known" in lines_of(case, "sums/0/6/1/0")


def test_a_served_session_is_found_by_its_name(case):
    rows = [experience(6, 0, explore_step=3), experience(6, 1, explore_step=3, session="ticket-4711")]
    ParquetLog(case.storage).commit(rows, explore_step=3, unit=0)
    assert trace(case.url, "ticket-4711").uid == "sums/0/6/1/0"
    assert "session ticket-4711" in lines_of(case, "ticket-4711")
    with pytest.raises(DataError, match=r"no experience 'ticket-4712' .*, or a served session"):
        trace(case.url, "ticket-4712")


def test_a_dropped_experience_shows_its_reason(case):
    traced = trace(case.url, "sums/0/3/1/0")
    assert [(copy.state, copy.reason) for copy in traced.copies] == [("dropped", "failed")]
    lines = lines_of(case, "sums/0/3/1/0")
    assert "status failed, ValueError: no number (attempt 0)" in lines
    assert "reward none (a failure has no reward)" in lines
    assert "dropped failed, when the batch of step 2 was formed (lineage main)" in lines


def test_a_waiting_experience_has_no_ledger_entry(case):
    traced = trace(case.url, "sums/0/4/0/0")
    assert [(copy.state, copy.uses) for copy in traced.copies] == [("waiting", ())]
    assert "waiting no ledger entry names it yet" in lines_of(case, "sums/0/4/0/0")


def test_trace_both_copies_of_a_repeat_the_trained_one_first(case):
    traced = trace(case.url, "sums/0/1/0/0")
    assert [(copy.shard, copy.state, copy.reason) for copy in traced.copies] == [
        (case.taken, "trained", ""),
        (case.repeated, "dropped", "repeat"),
    ]
    assert [s["uid"] for s in traced.siblings] == ["sums/0/1/0/0", "sums/0/1/1/0"]
    lines = lines_of(case, "sums/0/1/0/0")
    assert "dropped its work unit ran twice; the other copy counts" in lines


def test_an_experience_of_two_lineages_shows_both_steps(case):
    Ledger(case.storage, "fork").write(LedgerEntry(1, "fork", (Rows(case.taken.text, (2,)),)))
    (copy, _) = trace(case.url, "sums/0/1/0/0").copies
    assert sorted((use.lineage, use.step) for use in copy.uses) == [("fork", 1), ("main", 1)]


def test_detect_weights_that_do_not_match_their_hash(case):
    (fits,) = trace(case.url, "sums/0/5/0/0").copies
    (differs,) = trace(case.url, "sums/0/5/1/0").copies
    assert fits.weights.endswith(": matches weights/1, lineage main")
    assert differs.weights.startswith("hash ffffffffffffffff DIFFERS from the stored weights of this version: ")
    case.storage.remove("weights/1")
    (gone,) = trace(case.url, "sums/0/5/1/0").copies
    assert gone.weights == "hash ffffffffffffffff: not verified, because weights/1 is no longer on storage"


def test_an_unreported_step_has_no_metrics(case):
    Ledger(case.storage).write(LedgerEntry(3, "main", (Rows(case.waiting.text, (0, 1, 2, 3)),)))
    (copy,) = trace(case.url, "sums/0/4/0/0").copies
    assert (copy.uses[0].metrics, copy.uses[0].checkpoint, copy.uses[0].evaluations) == ({}, None, ())
    assert "waiting for step 3, row 1 of 4 (lineage main), which is not complete yet" in lines_of(case, "sums/0/4/0/0")


def test_model_text_reaches_the_terminal_without_codes(case):
    text = trace(case.url, "sums/0/3/0/0").render()
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\x1b[2J\\u202e" in text


def test_an_unknown_uid_lists_the_nearest(case):
    with pytest.raises(DataError, match=r"(?s)no experience 'sums/0/4/7/0'.*nearest of 12:\n  sums/0/4/1/0\n"):
        trace(case.url, "sums/0/4/7/0")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("a/b/0/4", ["a/b/0/4/0/0", "a/b/0/4/1/0"]),  # a part of a uid is its group; a taskset's name may hold "/"
        ("a/b/1/5/0/0", ["a/b/0/5/0/0", "a/b/0/4/0/0"]),  # the task in another epoch, before another task
        ("nothing like it", ["a/b/0/4/0/0", "a/b/0/4/1/0"]),
        ("", ["a/b/0/4/0/0", "a/b/0/4/1/0"]),
    ],
)
def test_nearest_means_the_same_task_first(typed, nearest):
    assert nearest_uids(typed, {"a/b/0/4/0/0", "a/b/0/4/1/0", "a/b/0/5/0/0", "c/0/400/0/0"}, count=2) == nearest


def test_an_experiment_traces_too(case):
    assert str(Experiment(case.config).trace("sums/0/2/0/0")).startswith("sums/0/2/0/0  (stage run)\n")
