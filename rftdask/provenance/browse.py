"""Browse: the experiences of a run as values that a page shows: a filtered, sorted list, and one with its tokens.

It knows neither HTML nor HTTP. Invariant: what the pages say is in the tables; nothing is computed that an algorithm
would compute otherwise, so no advantages, only the distance of a reward to the mean of its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from rftdask.buffer.log.schema import runs_to_mask
from rftdask.errors import DamagedError, DataError, NotFoundError
from rftdask.provenance.tables import RunTables
from rftdask.run.view import Stage
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    import pandas as pd

PAGE_SIZE = 50
PROBABILITY_LEVELS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03)
"""Lower ends of the classes in which a token is shown, the likeliest first."""
SORTS = {
    "": "order of the log",
    "-reward": "highest reward first",
    "reward": "lowest reward first",
    "-response_length": "longest response first",
    "surprise": "least likely response first",
}
_LIST_COLUMNS = ["stage", "shard", "row", "uid", "taskset", "epoch", "task_index", "explore_step", "status", "reward"]
_TEXT_COLUMNS = ["prompt_text", "response_text", "truth", "error"]

Pieces = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each."""


@dataclass(frozen=True)
class Filter:
    """The experiences that a page asks for in its query string. An empty field means any."""

    stage: str = ""
    explore_step: str = ""
    step: str = ""
    """Optimizer step that used or dropped it."""
    status: str = ""
    state: str = ""
    """trained, dropped, waiting, or the reason of a drop."""
    min_reward: str = ""
    max_reward: str = ""
    task: str = ""
    """Part of the uid."""
    text: str = ""
    """Part of the prompt or the response, in any case."""
    sort: str = ""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Filter:
        """Unknown keys are left out. Raises: DataError: a number that is none, or an unknown order."""
        found = cls(**{name: query[name].strip() for name in asdict(cls()) if name in query})
        for name in ("explore_step", "step", "min_reward", "max_reward"):
            value = getattr(found, name)
            if value and not _is_number(value):
                raise DataError(f"{name} must be a number, not {value!r}")
        if found.sort not in SORTS:
            raise DataError(f"sort must be one of {', '.join(filter(None, SORTS))}, not {found.sort!r}")
        return found

    @property
    def query(self) -> dict[str, str]:
        """The values of the query string, which `from_query` reads back."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True)
class ListPage:
    rows: list[dict[str, Any]]
    num_rows: int
    """Of all pages."""
    page: int
    """From 1."""
    num_pages: int


@dataclass(frozen=True)
class Token:
    number: int
    id: int
    text: str
    logprob: float | None = None
    """None for a token of the prompt."""
    is_trained: bool = False

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(min(0.0, self.logprob))

    @property
    def level(self) -> int:
        """Class of its probability: 0 the likeliest, len(PROBABILITY_LEVELS) the least."""
        return sum((self.probability or 0.0) < low for low in PROBABILITY_LEVELS)


@dataclass(frozen=True)
class Shown:
    """One experience for a page."""

    row: Mapping[str, Any]
    tokens: tuple[Token, ...]
    states: tuple[Mapping[str, Any], ...]
    """Lines of the table `states`."""
    siblings: tuple[Mapping[str, Any], ...] = field(default=())
    """Rows of its group in the same shard, with `minus_mean`: reward minus the mean over the group."""

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.row["metrics"] or ())


class Browser:
    """The experiences of one run, read once; make another to see what has come since.

    Example: browser = Browser("runs/project/name"); browser.page(Filter(status="failed"), 1).rows
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._tables = RunTables(url)
        self._experiences = self._tables.table("experiences")
        self._states = self._tables.table("states")
        self._pieces = {stage.name: read_pieces(stage) for stage in self._tables.stages}

    @property
    def problems(self) -> list[str]:
        """Files that could not be read."""
        return self._tables.problems

    def choices(self, column: str) -> list[str]:
        """Values that a column of the list has, for a menu."""
        return sorted(str(value) for value in self._list[column].dropna().unique())

    def page(self, wanted: Filter, number: int, size: int = PAGE_SIZE) -> ListPage:
        """Page `number` of what `wanted` lets through, or the last page if there are fewer."""
        found = self._list[self._matches(wanted)]
        if wanted.sort:
            found = found.sort_values(
                wanted.sort.removeprefix("-"), ascending=not wanted.sort.startswith("-"), kind="stable"
            )
        num_pages = max(1, math.ceil(len(found) / size))
        number = min(max(1, number), num_pages)
        rows = found.iloc[(number - 1) * size : number * size]
        return ListPage(rows.astype(object).where(rows.notna(), None).to_dict("records"), len(found), number, num_pages)

    def show(self, stage: str, shard: str, row: int) -> Shown | None:
        """One experience, or None if the run has none there."""
        table = self._experiences
        in_shard = table.filter(pc.and_(pc.equal(table["stage"], stage), pc.equal(table["shard"], shard)))
        found = in_shard.filter(pc.equal(in_shard["row"], row)).to_pylist()
        if not found:
            return None
        place = (self._list["stage"] == stage) & (self._list["shard"] == shard)
        mine = self._list[place & (self._list["row"] == row)].iloc[0]
        group = self._list[place & (self._list["group"] == mine["group"])].drop_duplicates("row")
        group = group.assign(minus_mean=group["reward"] - group["reward"].mean())
        states = self._states
        same = [pc.equal(states[name], value) for name, value in (("stage", stage), ("shard", shard), ("row", row))]
        return Shown(
            found[0],
            tokens_of(found[0], self._pieces[stage]),
            tuple(states.filter(pc.and_(pc.and_(same[0], same[1]), same[2])).to_pylist()),
            tuple(group.astype(object).where(group.notna(), None).to_dict("records")),
        )

    @cached_property
    def _list(self) -> pd.DataFrame:
        """One line for each line of `states`, without tokens."""
        table = self._experiences
        frame = table.select([*_LIST_COLUMNS, *_TEXT_COLUMNS, "prompt_length"]).to_pandas()
        frame["response_length"] = pc.list_value_length(table["rollout_logprobs"]).to_pandas()
        frame["surprise"] = [
            sum(values) / len(values) if len(values) else math.nan for values in table["rollout_logprobs"].to_pandas()
        ]
        groups = frame[["taskset", "epoch", "task_index"]].astype(str)
        frame["group"] = groups["taskset"] + "/" + groups["epoch"] + "/" + groups["task_index"]
        states = self._states.drop_columns(["uid"]).to_pandas()
        return frame.merge(states.astype({"step": "Int64"}), how="left", on=["stage", "shard", "row"])

    def _matches(self, wanted: Filter) -> pd.Series:
        rows = self._list
        found = rows["uid"].notna()  # all of them
        for name in ("stage", "status"):
            if value := getattr(wanted, name):
                found &= rows[name] == value
        for name in ("explore_step", "step"):
            if value := getattr(wanted, name):
                found &= (rows[name] == float(value)).fillna(False).astype(bool)
        if wanted.state:
            found &= (rows["state"] == wanted.state) | (rows["reason"] == wanted.state)
        if wanted.min_reward:
            found &= rows["reward"] >= float(wanted.min_reward)
        if wanted.max_reward:
            found &= rows["reward"] <= float(wanted.max_reward)
        if wanted.task:
            found &= rows["uid"].str.contains(wanted.task, regex=False)
        if wanted.text:
            texts = rows["prompt_text"] + "\0" + rows["response_text"]
            found &= texts.str.contains(wanted.text, case=False, regex=False)
        return found


def tokens_of(row: Mapping[str, Any], pieces: Pieces) -> tuple[Token, ...]:
    """Every token of an experience; those of the prompt have no logprob and are not trained."""
    start = row["prompt_length"]
    mask = runs_to_mask(row["loss_mask_runs"], len(row["tokens"]) - start)
    texts = pieces(row["tokens"])
    prompt = [Token(n, row["tokens"][n], texts[n]) for n in range(start)]
    response = [
        Token(start + n, row["tokens"][start + n], texts[start + n], logprob, trained)
        for n, (logprob, trained) in enumerate(zip(row["rollout_logprobs"], mask, strict=True))
    ]
    return (*prompt, *response)


def read_pieces(stage: Stage) -> Pieces:
    """The tokenizer of a stage, from its newest checkpoint or its model folder; without one a token is its number."""
    if not stage.config.explorer.rollout_model.traits.has_model:
        return lambda ids: [bytes([token % 256]).decode("latin-1") for token in ids]
    data = _tokenizer_file(stage)
    if data is None:
        return lambda ids: [f"{token} " for token in ids]
    from tokenizers import Tokenizer  # late: only pages need it; much lighter than transformers

    tokenizer = Tokenizer.from_str(data.decode())
    return lambda ids: [_piece(tokenizer, token) for token in ids]


def _tokenizer_file(stage: Stage) -> bytes | None:
    for step in reversed(checkpoint_steps(stage.storage)):
        try:
            return stage.storage.get(f"{checkpoint_folder(step)}/{HF_FOLDER}/tokenizer.json")
        except (NotFoundError, DamagedError):
            continue  # a checkpoint without a Hugging Face folder, or one being removed
    file = Path(stage.config.model.model_path) / "tokenizer.json"
    return file.read_bytes() if file.is_file() else None


def _piece(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    raw: str = tokenizer.id_to_token(token) or f"<{token}>"
    if not text or "\ufffd" in text:
        return raw  # part of a character: only the token's own spelling tells it from others
    # Decoders drop the space that begins a text; alone, every token begins one.
    return f" {text}" if raw[0] in "\u2581\u0120" and not text.startswith(" ") else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
