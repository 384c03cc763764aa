"""Run the cases of every peer and collect the results: agreement, documented difference, skip or failure."""

import importlib.metadata
from dataclasses import dataclass

import torch
from torch import Tensor

from rftdask.testing.conformance import formulas, openrlhf, trinity, trl, verl
from rftdask.testing.conformance.cases import Batch, Case, Peer, sample_batch

PEERS = (
    Peer("TRL", "trl", trl.cases),
    Peer("verl", "verl", verl.cases),
    Peer("OpenRLHF", "openrlhf", openrlhf.cases),
    Peer("Trinity-RFT", "trinity-rft", trinity.cases),
    Peer("own formula", "", formulas.cases),
)
TOLERANCE_32 = 1e-6


@dataclass(frozen=True)
class Row:
    peer: str
    version: str
    what: str
    status: str
    """One of: agree, differs (as documented), skipped, FAILED."""
    error: float
    """Largest difference of value or gradient in float32, relative to max(1, |theirs|)."""
    note: str


def run_conformance(num_seeds: int = 4) -> list[Row]:
    """Run all cases of all peers over `num_seeds` batches of every kind, in float32 and float64."""
    rows = []
    for peer in PEERS:
        try:
            version = importlib.metadata.version(peer.distribution) if peer.distribution else ""
            cases = peer.cases()
        except (ImportError, AttributeError, RuntimeError, OSError) as error:
            # The import of a peer may fail in many ways; the row keeps the reason.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append(Row(peer.name, "", "everything", "skipped", 0.0, reason))
            continue
        rows.extend(_compare(peer.name, version, case, num_seeds) for case in cases)
    return rows


def _compare(peer: str, version: str, case: Case, num_seeds: int) -> Row:
    worst_32 = 0.0
    excess = 0.0
    for kind in case.kinds:
        for seed in range(num_seeds):
            error = _difference(case, sample_batch(seed, torch.float32, kind=kind))
            worst_32 = max(worst_32, error)
            excess = max(excess, error / TOLERANCE_32)
            if not case.float32_only:
                excess = max(
                    excess, _difference(case, sample_batch(seed, torch.float64, kind=kind)) / case.tolerance_64
                )
    if case.differs:
        # A documented difference that no longer exists means that the table is wrong.
        return Row(peer, version, case.what, "differs" if excess > 1.0 else "FAILED", worst_32, case.differs)
    return Row(peer, version, case.what, "agree" if excess <= 1.0 else "FAILED", worst_32, "")


def _difference(case: Case, batch: Batch) -> float:
    ours, theirs = case.ours(batch), case.theirs(batch)
    errors = [_relative(ours, theirs)] if case.compare_value else []
    # Two losses may agree in value but not in gradient.
    if theirs.requires_grad:
        gradients = [torch.autograd.grad(side, batch.policy)[0] * batch.mask for side in (ours, theirs)]
        errors.append(_relative(*gradients))
    return max(errors)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    # Relative to the largest value, and at least to 1, since relative errors near 0 are meaningless.
    scale = torch.clamp(theirs.abs().max(), min=1.0)
    # NaN does not compare as larger and would pass as agreement.
    return float(((ours - theirs).abs() / scale).max().nan_to_num(nan=torch.inf))


def failures(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.status == "FAILED"]


def format_table(rows: list[Row]) -> str:
    """Rows as a Markdown table, followed by a line of counts."""
    lines = ["| Peer | Function | Result | Largest error (float32) | Note |", "|---|---|---|---|---|"]
    for row in rows:
        error = f"{row.error:.1e}" if row.status in ("agree", "FAILED") else ""
        lines.append(f"| {f'{row.peer} {row.version}'.strip()} | {row.what} | {row.status} | {error} | {row.note} |")
    counts = {status: sum(row.status == status for row in rows) for status in ("agree", "differs", "FAILED", "skipped")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items())])
