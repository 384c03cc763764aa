"""What a new version of the weights takes at sizes that are not measured here; prints a table for docs/weights.md.

    python benchmarks/weight_arithmetic.py

Pure arithmetic, every rate of which is an assumption that stands below with its reason; put in your own. The models of
time are those of the code: what is sequential is added, what goes side by side takes as long as its slowest. Half of
the machines train and half generate; where there is one machine, it does both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GB = 1e9
GPUS_PER_MACHINE = 8
MODELS = {"7B": 7.6, "32B": 32.8, "70B": 70.6}
"""Billions of parameters, of Qwen2.5-7B, Qwen2.5-32B and Llama-3.3-70B."""
NUM_GPUS = (8, 64, 512)
BYTES = 2
"""Of a value: engines compute in bfloat16."""


@dataclass(frozen=True)
class Rates:
    """GB/s."""

    off_device: float = 25.0
    """Of one GPU into pinned memory: half of PCIe 5 x16, since eight GPUs share a host's memory."""
    between_gpus: float = 300.0
    """At which tensors are brought together over NVLink, per GPU."""
    between_machines: float = 40.0
    """The same over a network of 400 Gb/s a machine."""
    sockets: float = 5.0
    """Of a machine that sends or gets blocks by gloo or Dask: TCP, some streams, no RDMA."""
    hash: float = 4.0
    """Of the four threads of a process, sha256; a process of a rank, or the one reader of a machine."""
    memory: float = 8.0
    """Of a process that writes to /dev/shm."""
    disk_of_machine: float = 2.5
    """At which a machine writes to shared storage, and reads from it twice as fast."""
    storage: float = 25.0
    """At which all machines together write to shared storage, and read from it twice as fast."""
    load: float = 10.0
    """At which an engine copies from mapped files to one of its GPUs, which takes only its own part."""


RATES = Rates()


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes."""

    blocking_s: float
    visible_s: float
    """From the beginning of the publication."""
    served_s: float
    """Until the last engine has loaded it."""
    rank_bytes: float
    """Host memory of a rank: the copy that it writes."""
    machine_bytes: float
    """Host memory of an engine's machine: what its engines map."""
    storage_bytes: float
    """Written to and read from storage."""


def costs(billions: float, num_gpus: int, method: str, delta_share: float = 1.0, rates: Rates = RATES) -> Costs:
    """method: checkpoint, or one of those that hold (memory, nccl). delta_share: of the bytes, for deltas."""
    size = billions * BYTES  # GB
    machines = num_gpus // GPUS_PER_MACHINE
    trainers = engines = max(1, machines // 2)
    ranks = trainers * GPUS_PER_MACHINE
    part = size / ranks
    # Every rank takes part in bringing each tensor together, and keeps its own.
    gather = size / (rates.between_gpus if trainers == 1 else rates.between_machines)
    blocking = gather + part / rates.off_device
    per_machine = size / trainers
    if method == "checkpoint":
        # A rank hashes while it writes. Of a delta both are of all its bytes, and the writing of those that changed.
        writing = delta_share * max(per_machine / rates.disk_of_machine, size / rates.storage)
        visible = blocking + max(part / rates.hash, writing)
        reading = delta_share * max(size / (2 * rates.disk_of_machine), engines * size / (2 * rates.storage))
        if delta_share < 1:  # the whole is made of the version before, by one process, each block hashed once more
            reading += size / rates.hash
        arriving = max(reading, delta_share * size / rates.hash)
        stored = delta_share * size * (1 + engines)
    else:
        visible = blocking + part / rates.hash + GPUS_PER_MACHINE * part / (GPUS_PER_MACHINE * rates.memory)
        # Blocks go down a tree while they come, so the time is that of one edge, of which a node has two.
        arriving = 0.0 if machines == 1 else max(2 * size / rates.sockets, size / rates.hash)
        stored = 0.0
    served = visible + arriving + size / GPUS_PER_MACHINE / rates.load
    # The rank's copy, with deltas also that of the version before; what is held lies in /dev/shm beside it.
    rank = part * (2 if method != "checkpoint" or delta_share < 1 else 1)
    machine = size * (2 if method != "checkpoint" or delta_share < 1 else 1)
    return Costs(blocking, visible, served, rank * GB, machine * GB, stored * GB)


WAYS = (("checkpoint", 1.0), ("checkpoint, deltas of 2 %", 0.02), ("memory or nccl", 1.0))


def cases() -> Iterator[tuple[str, int, str, Costs]]:
    """(model, number of GPUs, way, what it costs), in the order of the table."""
    for model, billions in MODELS.items():
        for num_gpus in NUM_GPUS:
            for way, share in WAYS:
                yield model, num_gpus, way, costs(billions, num_gpus, way.partition(",")[0], share)


def main() -> None:
    from report import Report, make_parser  # late: beside this script, and not there for a test that imports it

    args = make_parser(__doc__).parse_args()
    print_table()
    if args.json is not None:
        report = Report(args)
        for model, num_gpus, way, told in cases():
            work = f"{model}, {num_gpus} GPUs, {way}: all serve it"
            report.add(work, told.served_s, "s", less_is_better=True)
        report.write()


def print_table() -> None:
    """Print the table of docs/weights.md."""
    print("| model | GPUs | method | step waits | visible | all engines serve it | rank, machine | storage |")
    print("|---|---|---|---|---|---|---|---|")
    for model, num_gpus, way, told in cases():
        seconds = " | ".join(f"{_short(value)} s" for value in (told.blocking_s, told.visible_s, told.served_s))
        memory = f"{_short(told.rank_bytes / GB)}, {_short(told.machine_bytes / GB)} GB"
        print(f"| {model} | {num_gpus} | {way} | {seconds} | {memory} | {_short(told.storage_bytes / GB)} GB |")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


if __name__ == "__main__":
    main()
