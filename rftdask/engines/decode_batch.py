"""DecodeBatch: bookkeeping of continuous batching. Independent of the model.

Requests wait, enter as rows while others run, and leave when they have finished; the result of a row is returned at
once, even if the row stays for a while. Sequences are padded on the left: the next token is always in the last column.

Shapes: B = rows in the batch, D = distinct prompts of entering rows, P = longest of them, T = longest response, W =
columns: the longest sequence so far, V = vocabulary, X = experts per token, 0 if not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rftdask.engines.base import GenerateRequest, Generation, SamplingParams
from rftdask.engines.sampling import Guide, SamplingRows, Uniforms, sample_tokens


class Prompts:
    """Distinct prompts of requests, as model inputs."""

    def __init__(self, requests: Sequence[GenerateRequest], device: torch.device) -> None:
        # The shared prompt of a group is computed once.
        index_of: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
        asked = [(request.prompt_tokens, request.images) for request in requests]
        prompt_B = [index_of.setdefault(prompt, len(index_of)) for prompt in asked]
        self.images = [images for _, images in index_of]
        """Image names of each distinct prompt."""
        self.longest = max(len(prompt) for prompt, _ in index_of)
        tokens_DP = np.zeros((len(index_of), self.longest), dtype=np.int64)
        mask_DP = np.zeros(tokens_DP.shape, dtype=np.int64)
        for (prompt, _), index in index_of.items():
            # Right-aligned, so that the last column holds the last token of every prompt.
            tokens_DP[index, -len(prompt) :] = prompt
            mask_DP[index, -len(prompt) :] = 1
        # Positions count tokens, not columns. Padding gets position 0, which the mask hides.
        positions_DP = np.maximum(mask_DP.cumsum(axis=1) - 1, 0)
        self.prompt_B = torch.tensor(prompt_B, device=device)
        """[B] index of the prompt of each request among the distinct ones."""
        self.lengths = [len(prompt) for prompt, _ in index_of]
        """Number of tokens of each distinct prompt."""
        self.tokens_DP = torch.from_numpy(tokens_DP).to(device)
        self.positions_DP = torch.from_numpy(positions_DP).to(device)
        # Without a mask attention is faster; this is exact if there is no padding.
        self.mask_DP = None if mask_DP.all() else torch.from_numpy(mask_DP).to(device)


@dataclass
class _Rows:
    """Tensors of the running rows, with one column more than T for writes of finished rows."""

    start_B: Tensor
    """First column that is not padding."""
    shift_B: Tensor
    """Offset of the positions of sampled tokens, since an image may take fewer positions than tokens."""
    length_B: Tensor
    """[B] number of sampled tokens, until the row has finished."""
    done_B: Tensor
    uniforms_BT: Tensor
    tokens_BT: Tensor
    logprobs_BT: Tensor
    seen_BV: Tensor
    """[B, V] True for tokens that occurred; [B, 0] if no row has a repetition penalty."""
    experts_BTX: Tensor
    """int16 experts of the sampled tokens, once the model has processed them."""

    @classmethod
    def make(
        cls, requests: Sequence[GenerateRequest], vocab_size: int, columns: int, device: torch.device, num_choices: int
    ) -> _Rows:
        """Rows of requests that enter a batch of `columns` columns, without sampled tokens."""
        params = [request.sampling for request in requests]
        uniforms_BT = np.zeros((len(requests), max(param.max_tokens for param in params) + 1))
        uniforms = Uniforms()
        for row, (request, param) in enumerate(zip(requests, params, strict=True)):
            if param.temperature > 0:
                # Drawn at once, so that number t does not depend on the batch and no random state moves with rows.
                uniforms_BT[row, : param.max_tokens] = uniforms.draw(request.seed, param.max_tokens)
        penalized = any(param.repetition_penalty != 1 for param in params)
        seen_BV = np.zeros((len(requests), vocab_size if penalized else 0), dtype=bool)
        for row, request in enumerate(requests if penalized else ()):
            seen_BV[row, list(request.prompt_tokens)] = True
        return cls(
            start_B=torch.tensor([columns - len(request.prompt_tokens) for request in requests], device=device),
            shift_B=torch.zeros(len(requests), dtype=torch.int64, device=device),
            length_B=torch.zeros(len(requests), dtype=torch.int64, device=device),
            done_B=torch.zeros(len(requests), dtype=torch.bool, device=device),
            uniforms_BT=torch.from_numpy(uniforms_BT).to(device),
            tokens_BT=torch.zeros(uniforms_BT.shape, dtype=torch.int64, device=device),
            logprobs_BT=torch.zeros(uniforms_BT.shape, dtype=torch.float32, device=device),
            seen_BV=torch.from_numpy(seen_BV).to(device),
            experts_BTX=torch.zeros((*uniforms_BT.shape, num_choices), dtype=torch.int16, device=device),
        )

    def select(self, index_B: Tensor) -> _Rows:
        """Rows at these indices, in this order."""
        return _Rows(*(getattr(self, field.name)[index_B] for field in fields(self)))

    def joined(self, others: _Rows) -> _Rows:
        """Rows of both, these first. `start_B` of both counts the same columns."""
        values: list[Tensor] = []
        for field in fields(self):
            pair = [getattr(self, field.name), getattr(others, field.name)]
            if pair[0].dim() > 1:  # the shorter one is padded on the right with 0 or False
                longest = max(value.shape[1] for value in pair)
                others_dims = (0, 0) * (pair[0].dim() - 2)
                pair = [pad(value, (*others_dims, 0, longest - value.shape[1])) for value in pair]
            values.append(torch.cat(pair))
        return _Rows(*values)


class DecodeBatch:
    """Running rows and waiting requests: `add` and `enter` them; while there are `numbers`, `sample`, collect those
    `finished`, and `drop_done` some of them. `TransformersEngine._serve` is the loop.

    Finished rows continue to sample until they are dropped; these tokens are discarded.
    """

    def __init__(
        self,
        end_ids: Tensor,
        vocab_size: int,
        device: torch.device,
        decode: Callable[[list[int]], str] | None = None,
        num_choices: int = 0,
        guide: Callable[[SamplingParams], Guide] | None = None,
    ) -> None:
        """
        Args:
            decode: decodes tokens, for requests with stop texts. None: stop texts are ignored.
            num_choices: X.
            guide: creates the guide of a request with a grammar. None: no request has one.
        """
        self.columns = 0
        """W: columns of the cache plus the newest token."""
        self.numbers: list[int] = []
        """Request number of each row, in row order."""
        self.told: set[int] = set()
        """Numbers of finished rows whose result was returned or is not needed."""
        self._waiting: dict[int, GenerateRequest] = {}  # in order of arrival
        # By the number of a row:
        self._requests: dict[int, GenerateRequest] = {}
        self._versions: dict[int, list[tuple[int, int]]] = {}  # (token index, policy version that samples from there)
        self._guides: dict[int, Guide] = {}
        self._prompt_experts: dict[int, np.ndarray] = {}  # [tokens, X] int16
        self._newest_version: int | None = None  # of the last `note_version`
        self._stopped: set[int] = set()  # numbers of rows ended by a stop text
        self._decode, self._guide, self._num_choices = decode, guide, num_choices
        self._end_ids, self._ends = end_ids, frozenset(end_ids.tolist())
        self._vocab_size, self._device = vocab_size, device
        self._rows: _Rows
        self._padded = False

    def add(self, number: int, request: GenerateRequest) -> None:
        """Queue a request for `enter`."""
        self._waiting[number] = request

    def forget(self, number: int) -> None:
        """Cancel a request: it leaves the queue, or its row counts as finished. No effect once it has left."""
        if self._waiting.pop(number, None) is None and number in self._requests:
            self.told.add(number)
            self._rows.done_B[self.numbers.index(number)] = True

    def num_fitting(self, max_batch_tokens: int) -> int:
        """Number of waiting requests that may enter now, in order: rows * (columns + longest remaining response) stays
        within `max_batch_tokens`. At least one if there are no rows."""
        rest = 0
        if self.numbers:
            lengths = zip(self.numbers, self._rows.length_B.tolist(), strict=True)
            rest = max(self._requests[number].sampling.max_tokens - length for number, length in lengths)
        columns, num_rows = self.columns, len(self.numbers)
        for num_fitting, request in enumerate(self._waiting.values()):
            columns = max(columns, len(request.prompt_tokens))
            rest = max(rest, request.sampling.max_tokens)
            # Every row has as many columns as the longest one, so a long prompt costs all rows.
            if (num_rows + num_fitting) and (num_rows + num_fitting + 1) * (columns + rest) > max_batch_tokens:
                return num_fitting
        return len(self._waiting)

    def enter(self, num_newcomers: int, policy_version: int) -> Prompts:
        """Append rows for the next `num_newcomers` (at least one) waiting requests and return their prompts, which are
        computed with the weights of `policy_version`. The caller pads the smaller cache on the left."""
        numbers = list(islice(self._waiting, num_newcomers))
        requests = [self._waiting.pop(number) for number in numbers]
        for number, request in zip(numbers, requests, strict=True):
            if request.sampling.is_guided and self._guide is not None:
                self._guides[number] = self._guide(request.sampling)
        prompts = Prompts(requests, self._device)
        columns = max(self.columns, prompts.longest)
        newcomers = _Rows.make(requests, self._vocab_size, columns, self._device, self._num_choices)
        if self.numbers:
            # For a longer prompt the running rows are padded on the left.
            self._rows.start_B += columns - self.columns
            newcomers = self._rows.joined(newcomers)
        self.columns = columns
        self.numbers += numbers
        self._requests.update(zip(numbers, requests, strict=True))
        self._versions.update((number, [(0, policy_version)]) for number in numbers)
        self._set_rows(newcomers)
        return prompts

    def shift_positions(self, prompts: Prompts, shift_D: Sequence[int]) -> None:
        """Set the position offsets after the prompts that have just entered."""
        shift_B = torch.tensor(shift_D, device=self._device)[prompts.prompt_B]
        self._rows.shift_B[-len(shift_B) :] = shift_B

    def note_prompts(self, prompts: Prompts, experts_DPX: Tensor) -> None:
        """Record the experts of the prompts that have just entered."""
        if not self._num_choices:
            return
        of_prompts, index_of = experts_DPX.cpu().numpy(), prompts.prompt_B.tolist()
        for number, index in zip(self.numbers[-len(index_of) :], index_of, strict=True):
            self._prompt_experts[number] = of_prompts[index, -len(self._requests[number].prompt_tokens) :]

    def note_experts(self, experts_BX: Tensor) -> None:
        """Record the experts of the newest token of each row."""
        # A finished row overwrites those of its last token, which are not returned.
        if self._num_choices:
            rows = torch.arange(len(experts_BX), device=self._device)
            self._rows.experts_BTX[rows, self._rows.length_B - 1] = experts_BX

    def note_version(self, policy_version: int) -> None:
        """Record the version of the logits of the next token of each row."""
        # Reads the device only if weights were loaded while rows run.
        if policy_version == self._newest_version:
            return
        self._newest_version = policy_version
        for number, length in zip(self.numbers, self._rows.length_B.tolist(), strict=True):
            if self._versions[number][-1][1] != policy_version:
                self._versions[number].append((length, policy_version))

    def _set_rows(self, rows: _Rows) -> None:
        self._rows = rows
        # Once per change of the rows instead of per step, since it waits for the device.
        self._padded = bool(rows.start_B.any())
        requests = [self._requests[number] for number in self.numbers]
        params = [request.sampling for request in requests]
        self._sampling = SamplingRows.stack(params, self._device)
        self._prompt_length_B = torch.tensor([len(each.prompt_tokens) for each in requests], device=self._device)
        self._max_tokens_B = torch.tensor([param.max_tokens for param in params], device=self._device)
        # Row, texts, and maximum tokens of the longest text: at most four bytes per character.
        self._stopping = [
            (row, param.stop, 4 * max(map(len, param.stop)) + 1)
            for row, param in enumerate(params if self._decode is not None else ())
            if param.stop
        ]
        self._streaming = [
            (row, request.on_tokens) for row, request in enumerate(requests) if request.on_tokens is not None
        ]
        self._ignore_end_B = torch.tensor([param.ignore_eos for param in params], device=self._device)
        self._bad_B = torch.zeros_like(rows.done_B)

    def sample(self, logits_BV: Tensor) -> Tensor:
        """Sample and record the next token of each row: [B] int64."""
        rows, may_come_BV = self._rows, None
        if self._guides:
            allowed_BV = np.ones((len(self.numbers), self._vocab_size), bool)
            for row, number in enumerate(self.numbers):
                if number in self._guides:
                    allowed_BV[row] = self._guides[number].allowed()
            may_come_BV = torch.from_numpy(allowed_BV).to(self._device)
        # Each row has its own write position, since rows entered at different times.
        place_B1 = rows.length_B[:, None]
        tokens_B, logprobs_B = sample_tokens(
            logits_BV,
            rows.uniforms_BT.gather(1, place_B1)[:, 0],
            self._sampling,
            num_sampled_B=rows.length_B,
            end_ids=self._end_ids,
            seen_BV=rows.seen_BV,
            may_come_BV=may_come_BV,
        )
        if rows.seen_BV.shape[1]:
            rows.seen_BV.scatter_(1, tokens_B[:, None], True)
        rows.tokens_BT.scatter_(1, place_B1, tokens_B[:, None])
        rows.logprobs_BT.scatter_(1, place_B1, logprobs_B[:, None])
        # A finished row does not grow: it writes into the column after its response.
        rows.length_B += ~rows.done_B
        self._bad_B = logprobs_B.isnan() & ~rows.done_B
        ended_B = torch.isin(tokens_B, self._end_ids) & ~self._ignore_end_B
        rows.done_B = rows.done_B | ended_B | (rows.length_B >= self._max_tokens_B)
        self.columns += 1
        for row, number in enumerate(self.numbers if self._guides else ()):
            if number in self._guides:
                self._guides[number].take(int(tokens_B[row]))
        if self._stopping:
            self._stop_at_texts()
        return tokens_B

    def _stop_at_texts(self) -> None:
        # End rows that contain a complete stop text. Waits for the device, for these rows only.
        assert self._decode is not None
        rows = self._rows
        for row, stop, num_tokens in self._stopping:
            length = int(rows.length_B[row])
            if self.numbers[row] in self._stopped or rows.done_B[row]:
                continue
            newest = rows.tokens_BT[row, max(0, length - num_tokens) : length].tolist()
            if not any(text in self._decode(newest) for text in stop):
                continue
            # Decodes the complete response, since a few tokens may decode differently without context.
            whole = self._decode(rows.tokens_BT[row, :length].tolist())
            if any(text in whole for text in stop):
                rows.done_B[row] = True
                self._stopped.add(self.numbers[row])

    def counts(self) -> tuple[int, int]:
        """(finished rows, rows whose newest logprob is nan), as counts. The only wait for the device per step."""
        num_done, num_bad = torch.stack([self._rows.done_B.sum(), self._bad_B.sum()]).tolist()
        return num_done, num_bad

    def finished(self) -> list[tuple[int, Generation]]:
        """Number -> result of rows that have finished since the last call."""
        rows = self._rows
        done = zip(self.numbers, rows.done_B.tolist(), strict=True)
        places = [row for row, (number, is_done) in enumerate(done) if is_done and number not in self.told]
        index = torch.tensor(places, dtype=torch.int64, device=self._device)
        sampled = (rows.tokens_BT[index].tolist(), rows.logprobs_BT[index].tolist(), rows.length_B[index].tolist())
        found = []
        for row, tokens, logprobs, length in zip(places, *sampled, strict=True):
            number = self.numbers[row]
            self.told.add(number)
            # By the last token: a row that reached its limit with an end token has stopped.
            ended = tokens[length - 1] in self._ends and not self._requests[number].sampling.ignore_eos
            stopped = ended or number in self._stopped
            reason: Literal["stop", "length"] = "stop" if stopped else "length"
            versions = self._versions[number]
            experts: tuple[bytes, ...] = ()
            if self._num_choices:
                parts = self._prompt_experts[number], rows.experts_BTX[row, : length - 1].cpu().numpy()
                experts = tuple(token.tobytes() for part in parts for token in part)
            oldest = versions[0][1]
            answer = Generation(tuple(tokens[:length]), tuple(logprobs[:length]), reason, oldest, oldest, experts)
            found.append((number, answer if len(versions) == 1 else answer.sampled_by(versions)))
        return found

    def tell_newest(self) -> None:
        """Pass the newest token to each streaming row that has not finished. Waits for the device."""
        telling = [(row, take) for row, take in self._streaming if self.numbers[row] not in self.told]
        if telling:
            index = torch.tensor([row for row, _ in telling], dtype=torch.int64, device=self._device)
            newest = self._rows.tokens_BT[index, self._rows.length_B[index] - 1].tolist()
            for (_, take), token in zip(telling, newest, strict=True):
                take((token,))

    def drop_done(self, *, trim: bool) -> tuple[Tensor, int]:
        """Drop finished rows, whose results must have been returned, and if `trim` also columns without tokens.

        Returns: (indices of the kept rows among the previous rows, number of columns to drop on the left of the cache).
        """
        self.numbers = [number for number in self.numbers if number not in self.told]
        for number in self.told:
            del self._requests[number], self._versions[number]
            self._prompt_experts.pop(number, None)
            self._guides.pop(number, None)
        self._stopped -= self.told
        self.told = set()
        index_B = (~self._rows.done_B).nonzero()[:, 0]
        if not self.numbers:
            self.columns = 0
            return index_B, 0
        kept = self._rows.select(index_B)
        # Columns in which every remaining row has padding.
        num_columns = int(kept.start_B.min()) if trim and self._padded else 0
        kept.start_B -= num_columns
        self.columns -= num_columns
        self._set_rows(kept)
        return index_B, num_columns

    def mask(self) -> Tensor | None:
        """Attention mask [B, W], True at tokens. None: no padding."""
        if not self._padded:
            return None
        return torch.arange(self.columns, device=self._device) >= self._rows.start_B[:, None]

    def positions(self) -> Tensor:
        """Position ids [B] of the newest token in each sequence, which is the next input."""
        return self._prompt_length_B + self._rows.shift_B + (self._rows.length_B - 1)
