"""Promise: each of our functions agrees with the peers' or differs as the table documents. install_peers.sh installs
the peers; without them these tests fail, and `make test` skips them with the other extras.
"""

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rftdask.cli.app import app
from rftdask.config.schema.algorithm import registered_parts
from rftdask.testing.conformance import formulas
from rftdask.testing.conformance import run as runner
from rftdask.testing.conformance.cases import Case, Peer, loss_of, sample_batch
from rftdask.testing.conformance.run import PEERS, Row, failures, format_table, run_conformance


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    # Separate process: it uses the module names of a peer that rftdask.compat.trinity also provides.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(run_conformance, num_seeds=2).result()


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")  # warnings from the peers' imports
@pytest.mark.parametrize("name", [peer.name for peer in PEERS])
def test_every_function_agrees_or_differs_as_documented(name: str, rows: list[Row]) -> None:
    mine = [row for row in rows if row.peer == name]
    assert [row.note for row in mine if row.status == "skipped"] == []
    assert failures(mine) == []


ELSEWHERE = {"bradley_terry": "reward model loss", "jsd": "generalized_jsd_loss of GKD"}
"""Rows that name a part by its peer's name."""
NOTHING_TO_ASK = {"reinforce", "none"}
"""Rows of the reward itself, without KL."""


@pytest.mark.parametrize("kind", ["policy_loss_fn", "advantage_fn", "kl_loss_fn"])
def test_every_part_has_an_outside_oracle_in_the_table(kind: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    compared = [line.split("|")[2].strip() for line in page.splitlines() if line.endswith("|") and "| agree |" in line]
    word = {"policy_loss_fn": "loss", "advantage_fn": "advantage", "kl_loss_fn": "(estimate|penalty)"}[kind]
    for name in registered_parts(kind).keys() - NOTHING_TO_ASK:
        pattern = "GAE" if (kind, name) == ("advantage_fn", "ppo") else rf"\b{name} {word}|gradient of {name}"
        pattern = ELSEWHERE.get(name, pattern)
        assert any(re.search(pattern, row) for row in compared), f"{kind} {name}: no row that agrees"


def test_our_losses_are_formulas_written_down_once_more() -> None:
    assert {compare(case) for case in formulas.cases()} == {"agree"}


def compare(case: Case) -> str:
    return runner._compare("ours", "0", case, num_seeds=1).status


def test_the_suite_sees_a_wrong_value_and_a_wrong_gradient() -> None:
    right = Case("ppo", loss_of(), loss_of())
    assert compare(right) == "agree"
    assert compare(replace(right, theirs=lambda batch: loss_of()(batch) + 1e-5)) == "FAILED"
    shifted = replace(
        right, theirs=lambda batch: loss_of()(batch) + 1e-3 * (batch.policy - batch.policy.detach()).sum()
    )
    assert compare(shifted) == "FAILED"
    assert compare(replace(shifted, differs="its gradient is shifted")) == "differs"
    assert compare(replace(right, differs="it does not any more")) == "FAILED"


def test_an_absent_peer_is_a_counted_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PEERS", (Peer("Nobody", "no-such-distribution", list),))
    rows = run_conformance(1)
    assert [(row.peer, row.status) for row in rows] == [("Nobody", "skipped")]
    assert format_table(rows).endswith("0 agree, 0 differs, 0 FAILED, 1 skipped")


def test_the_command_fails_if_a_row_is_not_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Case("ppo", loss_of(), loss_of())
    peer = Peer("Torch", "torch", lambda: [right])
    monkeypatch.setattr(runner, "PEERS", (peer,))
    done = CliRunner().invoke(app, ["conformance"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "1 agree, 0 differs, 0 FAILED, 0 skipped")
    wrong = replace(right, theirs=lambda batch: 2 * loss_of()(batch))
    monkeypatch.setattr(runner, "PEERS", (replace(peer, cases=lambda: [wrong]),))
    done = CliRunner().invoke(app, ["conformance"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "0 agree, 0 differs, 1 FAILED, 0 skipped")


@pytest.mark.parametrize("kind", ["padded", "holes", "short", "empty", "extreme"])
def test_batches_have_the_properties_of_their_kind(kind: str) -> None:
    batch = sample_batch(0, torch.float32, kind=kind)
    lengths = batch.mask.sum(-1)
    assert (lengths == 0).any() == (kind == "empty")
    assert (lengths == 1).any() or kind != "short"
    assert ((batch.policy - batch.old).abs().max() > 5).item() == (kind == "extreme")
    inner = (~batch.mask[:, :-1] & batch.mask[:, 1:]).any()
    assert inner.item() == (kind == "holes")
