"""Estimated cost of a new version of the weights at sizes that were not measured; prints a table for docs/weights.md.

    python benchmarks/weight_arithmetic.py

Pure arithmetic. Each rate below is an assumption with its reason; replace it with your own. The model of time follows
the code: sequential parts add up, and parallel parts take as long as the slowest. Half of the machines train and half
generate; a single machine does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GB = 1e9
GPUS_PER_MACHINE = 8
MODELS = {"7B": 7.6, "32B": 32.8, "70B": 70.6}
"""Billions of parameters of Qwen2.5-7B, Qwen2.5-32B and Llama-3.3-70B."""
NUM_GPUS = (8, 64, 512)
BYTES = 2
"""Bytes per value: engines compute in bfloat16."""


@dataclass(frozen=True)
class Rates:
    """Transfer rates in GB/s."""

    off_device: float = 25.0
    """Copy from one GPU into pinned memory: half of PCIe 5 x16, because eight GPUs share the memory of a host."""
    between_gpus: float = 300.0
    """Gathering tensors over NVLink, per GPU."""
    between_machines: float = 40.0
    """Gathering tensors over a network of 400 Gb/s per machine."""
    sockets: float = 5.0
    """A machine that sends or receives blocks by gloo or Dask: TCP, several streams, no RDMA."""
    hash: float = 4.0
    """sha256 by the four threads of a process, which is a rank or the only reader of a machine."""
    memory: float = 8.0
    """A process that writes to /dev/shm."""
    disk_of_machine: float = 2.5
    """One machine that writes to shared storage; reading is twice as fast."""
    storage: float = 25.0
    """All machines together that write to shared storage; reading is twice as fast."""
    load: float = 10.0
    """An engine that copies from mapped files to one of its GPUs, which takes only its own part."""


RATES = Rates()


@dataclass(frozen=True)
class Costs:
    """Estimated seconds and bytes."""

    blocking_s: float
    visible_s: float
    """Seconds from the start of the publication until the pointer names it."""
    served_s: float
    """Seconds from the start of the publication until the last engine has loaded it."""
    rank_bytes: float
    """Host memory of a rank: the copy it writes."""
    machine_bytes: float
    """Host memory of an engine's machine: the files its engines map."""
    storage_bytes: float
    """Bytes written to and read from storage."""


def costs(billions: float, num_gpus: int, method: str, delta_share: float = 1.0, rates: Rates = RATES) -> Costs:
    """Estimate the costs. method: checkpoint, memory or nccl; the last two hold the weights. delta_share: share of the
    bytes in deltas.
    """
    size = billions * BYTES  # GB
    machines = num_gpus // GPUS_PER_MACHINE
    trainers = engines = max(1, machines // 2)
    ranks = trainers * GPUS_PER_MACHINE
    part = size / ranks
    # All ranks gather each tensor together, and each keeps its own part.
    gather = size / (rates.between_gpus if trainers == 1 else rates.between_machines)
    blocking = gather + part / rates.off_device
    per_machine = size / trainers
    if method == "checkpoint":
        # A rank hashes while it writes. With deltas it hashes all bytes and writes only those that changed.
        writing = delta_share * max(per_machine / rates.disk_of_machine, size / rates.storage)
        visible = blocking + max(part / rates.hash, writing)
        reading = delta_share * max(size / (2 * rates.disk_of_machine), engines * size / (2 * rates.storage))
        if delta_share < 1:  # one process builds the whole from the version before and hashes each block again
            reading += size / rates.hash
        arriving = max(reading, delta_share * size / rates.hash)
        stored = delta_share * size * (1 + engines)
    else:
        visible = blocking + part / rates.hash + GPUS_PER_MACHINE * part / (GPUS_PER_MACHINE * rates.memory)
        # Blocks travel down a tree as they arrive, so the time is that of one edge; a node has two.
        arriving = 0.0 if machines == 1 else max(2 * size / rates.sockets, size / rates.hash)
        stored = 0.0
    served = visible + arriving + size / GPUS_PER_MACHINE / rates.load
    # The rank holds its copy, with deltas also the version before; held weights are also in /dev/shm.
    rank = part * (2 if method != "checkpoint" or delta_share < 1 else 1)
    machine = size * (2 if method != "checkpoint" or delta_share < 1 else 1)
    return Costs(blocking, visible, served, rank * GB, machine * GB, stored * GB)


WAYS = (("checkpoint", 1.0), ("checkpoint, deltas of 2 %", 0.02), ("memory or nccl", 1.0))


def cases() -> Iterator[tuple[str, int, str, Costs]]:
    """Yield (model, number of GPUs, method, costs) in the order of the table."""
    for model, billions in MODELS.items():
        for num_gpus in NUM_GPUS:
            for way, share in WAYS:
                yield model, num_gpus, way, costs(billions, num_gpus, way.partition(",")[0], share)


def main() -> None:
    from report import (
        Report,
        make_parser,
    )  # late: report is importable only as a script, not for the test that imports this module

    args = make_parser(__doc__).parse_args()
    print_table()
    if args.json is not None:
        report = Report(args)
        for model, num_gpus, way, estimate in cases():
            work = f"{model}, {num_gpus} GPUs, {way}: all serve it"
            report.add(work, estimate.served_s, "s", less_is_better=True)
        report.write()


def print_table() -> None:
    """Print the table of docs/weights.md."""
    print("| model | GPUs | method | step waits | visible | all engines serve it | rank, machine | storage |")
    print("|---|---|---|---|---|---|---|---|")
    for model, num_gpus, way, estimate in cases():
        seconds = " | ".join(
            f"{_short(value)} s" for value in (estimate.blocking_s, estimate.visible_s, estimate.served_s)
        )
        memory = f"{_short(estimate.rank_bytes / GB)}, {_short(estimate.machine_bytes / GB)} GB"
        print(f"| {model} | {num_gpus} | {way} | {seconds} | {memory} | {_short(estimate.storage_bytes / GB)} GB |")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    main()
