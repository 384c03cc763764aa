"""The reference of all algorithm names, written from the code itself: `python -m rftdask.algorithm.describe` prints it.

Invariant: what the documentation says of a name is its class's docstring and its defaults, so the two cannot drift
apart.
"""

import dataclasses
import inspect
from collections.abc import Mapping

from rftdask.algorithm.advantages import ADVANTAGE_FNS, DEPRECATED_ADVANTAGE_FNS
from rftdask.algorithm.compose import ALGORITHMS, DEPRECATED_ALGORITHMS, make_algorithm
from rftdask.algorithm.correction import Correction
from rftdask.algorithm.entropy import ENTROPY_FNS
from rftdask.algorithm.kl import KL_FNS
from rftdask.algorithm.losses.policy_losses import POLICY_LOSS_FNS
from rftdask.algorithm.operators import OPERATORS

PARTS: dict[str, Mapping[str, type]] = {
    "Advantage functions": ADVANTAGE_FNS,
    "Policy losses": POLICY_LOSS_FNS,
    "KL": KL_FNS,
    "Entropy": ENTROPY_FNS,
    "Rollout correction": {"rollout_correction": Correction},
    "Experience operators": OPERATORS,
}


def describe() -> str:
    """Markdown: the table of algorithm types, then every part with its docstring and its arguments."""
    sections = ["## Algorithm types", _types(), ""]
    for title, table in PARTS.items():
        sections += [f"## {title}", ""]
        for name, cls in table.items():
            sections += [f"### `{name}`", "", inspect.cleandoc(cls.__doc__ or ""), "", _arguments(cls), ""]
    return "\n".join(sections).rstrip() + "\n"


def _types() -> str:
    head = [
        "type",
        "advantage",
        "policy loss",
        "KL loss",
        "entropy",
        "aggregation",
        "repeat_times",
        "critic",
        "reference",
    ]
    rows = [head, ["---"] * len(head)]
    for name, defaults in ALGORITHMS.items():
        algorithm = make_algorithm(name)
        rows.append(
            [
                f"`{name}`",
                _with_args(defaults.advantage_fn if algorithm.advantage_fn else None, defaults.advantage_fn_args),
                _with_args(defaults.policy_loss_fn, defaults.policy_loss_fn_args),
                defaults.kl_loss_fn,
                defaults.entropy_loss_fn,
                algorithm.loss_agg_mode,
                str(defaults.repeat_times),
                "yes" if algorithm.use_critic else "",
                "yes" if algorithm.use_reference else "",
            ]
        )
    twins = {**DEPRECATED_ADVANTAGE_FNS, **DEPRECATED_ALGORITHMS}
    old = ", ".join(f"`{old}` is `{new}`" for old, new in sorted(twins.items()))
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"\n{table}\n\nOld names, each with one warning: {old}; the sample strategy `warmup` is `default`."


def _with_args(name: str | None, args: Mapping[str, object]) -> str:
    given = ", ".join(f"{key} {value}" for key, value in args.items())
    return (name or "") + (f" ({given})" if given else "")


def _arguments(cls: type) -> str:
    fields = ", ".join(f"`{field.name}={field.default!r}`" for field in dataclasses.fields(cls))
    return f"Arguments: {fields or 'none'}."


if __name__ == "__main__":
    print(describe(), end="")
