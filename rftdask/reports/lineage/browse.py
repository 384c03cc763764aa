"""Browse: a filtered, sorted list of the experiences of a run, and single experiences with their tokens.

It returns values; `studio` renders the pages. Invariant: values come from the tables, without computations that an
algorithm might do differently, so no advantages, only rewards minus group means.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rftdask.buffer.log import open_log
from rftdask.buffer.log.columns import runs_to_mask
from rftdask.buffer.log.log import EXPERIENCES
from rftdask.buffer.log.schema import sampled_spans, token_versions
from rftdask.data.images import FOLDER as IMAGE_FOLDER
from rftdask.data.images import data_url, file_of
from rftdask.errors import DamagedError, DataError, NotFoundError, StorageError
from rftdask.reports.lineage.tables import EXPERIENCE_SCHEMA, PLACE, STATE_SCHEMA, RunTables
from rftdask.reports.run_reader import StageReader
from rftdask.storage import Storage
from rftdask.trainer.checkpoint import HF_FOLDER, checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    import pandas as pd

PAGE_SIZE = 50
PROBABILITY_LEVELS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03)
"""Lower bounds of the probability classes of tokens, the most likely first."""
LEVELS = tuple(
    f"{high:.0%} to {low:.0%}" if high < 1 else f"above {low:.0%}"
    for high, low in zip((1.0, *PROBABILITY_LEVELS), (*PROBABILITY_LEVELS, 0.0), strict=True)
)
SORTS = {
    "": "order of the log",
    "-reward": "highest reward first",
    "reward": "lowest reward first",
    "-response_length": "longest response first",
    "surprise": "least likely response first",
}
_GROUP = ["taskset", "epoch", "task_index"]
_LIST_COLUMNS = (
    *(*PLACE, "uid", "session", *_GROUP, "rollout", "explore_step", "status", "reward", "max_policy_version"),
    *("prompt_length", "prompt_text", "response_text", "truth", "error"),
)


@dataclass(frozen=True)
class Filter:
    """Filter of experiences from the query string of a page. An empty field matches everything."""

    stage: str = ""
    explore_step: str = ""
    step: str = ""
    """Optimizer step that used or dropped the experience."""
    status: str = ""
    state: str = ""
    """trained, dropped, waiting, or the reason of a drop."""
    min_reward: str = ""
    max_reward: str = ""
    task: str = ""
    """Part of the uid, or the name of a served session."""
    text: str = ""
    """Part of the prompt or the response, case-insensitive."""
    sort: str = ""

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Filter:
        """Parse a query string; unknown keys are ignored. Raises: DataError: an invalid number or order."""
        wanted = cls(**{name: query[name].strip() for name in asdict(cls()) if name in query})
        for name in {"explore_step", "step", "min_reward", "max_reward"}.intersection(wanted.query):
            with contextlib.suppress(ValueError):
                if math.isfinite(float(wanted.query[name])):
                    continue
            raise DataError(f"{name} must be a number, not {wanted.query[name]!r}")
        if wanted.sort not in SORTS:
            raise DataError(f"sort must be one of {', '.join(filter(None, SORTS))}, not {wanted.sort!r}")
        return wanted

    @property
    def query(self) -> dict[str, str]:
        """Values of the query string; inverse of `from_query`."""
        return {name: value for name, value in asdict(self).items() if value}


class ListPage(NamedTuple):
    """One page of the list; `page` counts from 1, and `num_rows` includes all pages."""

    rows: list[dict[str, Any]]
    num_rows: int
    page: int
    num_pages: int


class Token(NamedTuple):
    """One token of an experience; `logprob` is None for a token that was not sampled."""

    number: int
    id: int
    text: str
    logprob: float | None = None
    is_trained: bool = False
    source: str = ""
    """Source of a token added between two turns, such as "tool"; "" for sampled tokens and the prompt."""
    version: int | None = None
    """Policy version that sampled the token. None: not sampled, or unknown."""

    @property
    def probability(self) -> float:
        """Probability when the token was sampled; 0 if it was not sampled."""
        return 0.0 if self.logprob is None else math.exp(min(0.0, self.logprob))

    @property
    def level(self) -> int:
        """Probability class, from 0 (most likely) to len(PROBABILITY_LEVELS)."""
        return sum(self.probability < low for low in PROBABILITY_LEVELS)


class Shown(NamedTuple):
    """One experience with everything that its page shows."""

    row: Mapping[str, Any]
    tokens: Sequence[Token]
    states: Sequence[Mapping[str, Any]]
    siblings: Sequence[Mapping[str, Any]]
    """Rows of the group in the same shard, with `minus_mean`: reward minus group mean."""
    images: Sequence[str] = ()
    """Images of the prompts as data URLs; "data:," for a missing image."""


class Browser:
    """Experiences of one run, read once; create a new browser to see newer ones."""

    def __init__(self, url: str | Path, *, evals: bool = False) -> None:
        """evals: True for answers to evaluations, which no ledger contains. Raises: DataError: not a run folder."""
        self.url, self.evals = str(url), evals
        self.tables = tables = RunTables(url)
        self._experiences = tables.table("eval_experiences" if evals else "experiences")
        self._states = STATE_SCHEMA.empty_table() if evals else tables.table("states")
        self._spell = {stage.name: _read_spelling(stage) for stage in tables.stages}
        self.problems = tables.problems

    def choices(self, *columns: str) -> list[str]:
        return sorted({str(value) for column in columns for value in self.rows[column].dropna().unique()})

    def page(self, wanted: Filter, number: int, size: int = PAGE_SIZE) -> ListPage:
        """Return page `number` of the matching experiences, or the last page if there are fewer."""
        rows = self.rows
        keep = rows["uid"].notna()  # all of them
        for name, value in wanted.query.items():
            match name:
                case "stage" | "status":
                    keep &= rows[name] == value
                case "explore_step" | "step":
                    keep &= (rows[name] == float(value)).fillna(False).astype(bool)
                case "state":
                    keep &= (rows["state"] == value) | (rows["reason"] == value)
                case "min_reward":
                    keep &= rows["reward"] >= float(value)
                case "max_reward":
                    keep &= rows["reward"] <= float(value)
                case "task":
                    keep &= rows["uid"].str.contains(value, regex=False) | (rows["session"] == value)
                case "text":
                    # The NUL prevents matches that span prompt and response.
                    texts = rows["prompt_text"] + "\0" + rows["response_text"]
                    keep &= texts.str.contains(value, case=False, regex=False)
        matches = rows[keep]
        if sort := wanted.sort:
            matches = matches.sort_values(sort.removeprefix("-"), ascending=not sort.startswith("-"), kind="stable")
        num_pages = max(1, math.ceil(len(matches) / size))
        number = min(max(1, number), num_pages)
        return ListPage(records(matches.iloc[(number - 1) * size : number * size]), len(matches), number, num_pages)

    def show(self, stage: str, shard: str, row: int) -> Shown | None:
        place = (stage, shard, row)
        experiences, states, groups = self._index
        if place not in experiences:
            return None
        experience = self._experiences.take(experiences[place]).to_pylist()[0]
        key = stage, shard, "/".join(str(experience[name]) for name in _GROUP)
        group = self.rows.iloc[groups[key]].drop_duplicates("row")  # one line per ledger entry that names the row
        group = group.assign(minus_mean=group["reward"] - group["reward"].mean())

        start, ids = experience["prompt_length"], experience["tokens"]
        mask = runs_to_mask(experience["loss_mask_runs"], len(ids) - start)
        # [L]: prompt tokens and added tokens were not sampled, so they have neither logprobs nor a mask.
        sampled: list[tuple[float | None, bool, str, int | None]] = [(None, False, "", None)] * start
        versions = token_versions(experience)
        sources = [turn["source"] or "added" for turn in experience["turns"] or [{"source": ""}]]
        for source, (begin, end) in zip(sources, sampled_spans(experience), strict=True):
            sampled += [(None, False, source, None)] * (start + begin - len(sampled))
            sampled += [(experience["rollout_logprobs"][n], mask[n], "", versions[n]) for n in range(begin, end)]
        tokens = [Token(n, token, self._spell[stage](token), *sampled[n]) for n, token in enumerate(ids)]
        state_rows = self._states.take(states.get(place, np.array([], int))).to_pylist()
        [storage] = [reader.storage for reader in self.tables.stages if reader.name == stage]
        images = [_image(storage, name) for name in experience["images"] or ()]
        return Shown(experience, tokens, state_rows, records(group), images)

    @cached_property
    def _index(self) -> tuple[Mapping[Any, Any], Mapping[Any, Any], Mapping[Any, Any]]:
        """Row numbers in `_experiences` and `_states` by place, and in `rows` by stage, shard and group."""
        tables = (table.select(PLACE).to_pandas() for table in (self._experiences, self._states))
        experiences, states = (table.groupby(PLACE).indices for table in tables)
        return experiences, states, self.rows.groupby(["stage", "shard", "group"]).indices

    @cached_property
    def rows(self) -> pd.DataFrame:
        """One line per line of `states`, without tokens: columns of the tables, `response_length` in tokens, `surprise`
        (mean logprob of the response), `unpaid` (the response is the expected answer, with the lowest reward of its
        shard), and `group`, the key of the rows of one task.
        """
        states = self._states.drop_columns(["uid"]).to_pandas().astype({"step": "Int64"})
        return answer_rows(self._experiences).merge(states, how="left", on=PLACE)


def _image(storage: Storage, name: str) -> str:
    with contextlib.suppress(StorageError):
        return data_url(storage.get(f"{IMAGE_FOLDER}/{file_of(name)}"))
    return "data:,"


def answer_rows(table: pa.Table) -> pd.DataFrame:
    """Return one line per row of a table of experiences, with the columns of `Browser.rows` except the states."""
    frame = table.select(_LIST_COLUMNS).to_pandas()
    frame["turns"] = turns = table["turns"].to_pylist()
    frame["response_length"] = [
        length if spans is None else sum(span["end"] - span["start"] for span in spans)
        for length, spans in zip(pc.list_value_length(table["rollout_logprobs"]).to_pylist(), turns, strict=True)
    ]
    # Tokens that were not sampled have a logprob of 0, so they do not change the sum.
    logprobs = zip(table["rollout_logprobs"].to_pandas(), frame["response_length"], strict=True)
    frame["surprise"] = [sum(values) / count if count else math.nan for values, count in logprobs]
    groups = frame[_GROUP].astype(str)
    frame["group"] = groups["taskset"] + "/" + groups["epoch"] + "/" + groups["task_index"]
    # As the metric unpaid_truths.
    rewards = frame.groupby("shard")["reward"]
    lowest, highest = rewards.transform("min"), rewards.transform("max")
    truths = frame["truth"].fillna("").str.strip()
    is_truth = (truths != "") & (frame["response_text"].fillna("").str.strip() == truths) & (frame["status"] == "ok")
    frame["unpaid"] = is_truth & (frame["reward"] == lowest) & (lowest < highest)
    return frame


def sample_answers(tables: RunTables, *, evals: bool = False, max_rows: int) -> tuple[pd.DataFrame, int]:
    """Return about `max_rows` lines like `answer_rows`, and the number of all rows. Whole shards are sampled evenly
    from the first to the last; only one is in memory at a time, and tokens are not kept.
    """
    import pandas as pd  # late: half a second

    frames, total = [answer_rows(EXPERIENCE_SCHEMA.empty_table())], 0
    for stage in tables.stages:
        names = [name.rstrip("/") for name in stage.storage.list("eval") if name.endswith("/")] if evals else []
        for folder in [f"eval/{name}" for name in names] if evals else [EXPERIENCES]:
            shards = open_log(stage.storage, stage.config, folder).shards(0)
            num_rows = sum(name.num_rows for name in shards)
            total += num_rows
            # The first work unit of each evaluation has the same tasks.
            candidates = [name for name in shards if name.unit == 0] if evals and num_rows > max_rows else shards
            every = max(1, -(-sum(name.num_rows for name in candidates) // max_rows))
            kept = {name.text for name in candidates[::every]}
            frames += [answer_rows(rows) for _, rows in tables.read_shards(stage, folder, kept)]
    return pd.concat(frames, ignore_index=True), total


def records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a dict per row; missing values are None."""
    values: list[dict[str, Any]] = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return values


def _read_spelling(stage: StageReader) -> Callable[[int], str]:
    """Return a function from token id to text, by the tokenizer of the newest checkpoint or the model; without a
    tokenizer, the text is the number.
    """
    if not stage.config.explorer.rollout_model.traits.has_model:
        return lambda token: bytes([token % 256]).decode("latin-1")
    data = None
    for step in reversed(checkpoint_steps(stage.storage)):
        try:
            data = stage.storage.get(f"{checkpoint_folder(step)}/{HF_FOLDER}/tokenizer.json")
            break
        except (NotFoundError, DamagedError):
            continue  # the checkpoint has no Hugging Face folder, or is being removed
    file = Path(stage.config.model.model_path) / "tokenizer.json"
    if data is None and file.is_file():
        data = file.read_bytes()
    if data is None:
        return lambda token: f"{token} "
    from tokenizers import Tokenizer  # late: only pages need it; much lighter than transformers

    tokenizer = Tokenizer.from_str(data.decode())

    def spell(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        raw: str = tokenizer.id_to_token(token) or f"<{token}>"
        if not text or "\ufffd" in text:
            return raw  # part of a character: only the token's own spelling is unambiguous
        # Decoders drop the leading space of a text, and here each token is a text.
        return f" {text}" if raw[0] in "\u2581\u0120" and not text.startswith(" ") else text

    return spell
