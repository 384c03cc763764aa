"""The Tinker service: how a process of a run asks it, and the file that names weights that lie there.

Every wait has a deadline, and every error of the SDK becomes one of ours: what the service refuses is the user's to
mend, and what it does not answer may be answered to another try. The SDK repeats by itself what was lost on the way,
for five minutes. It knows neither trainers nor engines.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from rftdask.errors import DataError, NotInstalledError, ProcessLostError, RftError, UserError

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient

API_KEY = "TINKER_API_KEY"
"""Environment variable with the key, which stands nowhere else."""
SAMPLER_FILE = "sampler.json"
"""What is published in place of weights: where the service has them."""
ANSWER_TIMEOUT_S = 1200.0
"""For one answer of the service, which queues requests for minutes when it is busy; less than the half hour of silence
after which a trainer's rank is taken for hung."""
_REFUSED = (400, 401, 402, 403, 404, 405, 413, 422)
"""Status codes that another try would meet again."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def require_key() -> str:
    """The key. Raises: UserError: there is none."""
    key = os.environ.get(API_KEY, "")
    if not key:
        raise UserError(f"model.tinker: the service wants a key; export {API_KEY}=tml-... where the run starts")
    return key


def open_service(
    base_url: str | None, *, timeout_s: float = ANSWER_TIMEOUT_S, lost: type[RftError] = ProcessLostError
) -> ServiceClient:
    """A session at the service, which ends with this process. base_url: None is the hosted service.

    Raises: UserError: no key, no package, or the service refuses; `lost`: as `ask`.
    """
    key = require_key()
    try:
        from tinker import ServiceClient  # late: an optional package, which only runs at the service need
    except ImportError as error:
        raise NotInstalledError(
            f"model.tinker needs the package tinker: pip install 'rftdask[tinker]' ({error})"
        ) from error

    def connect() -> ServiceClient:
        service = ServiceClient(base_url=base_url, api_key=key)
        service.holder  # noqa: B018 (opens the session, which else waits for the first request)
        return service

    return ask("a session begins", connect, timeout_s=timeout_s, lost=lost)


class Answer(Protocol[T_co]):
    """What is under way there; the part of the SDK's futures that `result_of` uses."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for it. Raises: TimeoutError."""


def result_of(
    doing: str,
    answer: Answer[T],
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
    lost: type[RftError] = ProcessLostError,
) -> T:
    """Wait for what the service was asked.

    Args:
        doing: what is waited for, as it follows "while".
        lost: the error of a service that does not answer, or that fails.
    Raises: UserError: the service refuses; `lost`; what the answer itself raises.
    """
    import tinker  # late, as above
    from tinker.lib.retryable_exception import RetryableException

    try:
        return answer.result(timeout_s)
    except TimeoutError as error:
        raise lost(f"the Tinker service did not respond for {timeout_s:.0f} s while {doing}") from error
    except (tinker.APIStatusError, tinker.RequestFailedError) as error:
        refused = (
            error.category is tinker.types.RequestErrorCategory.User
            if isinstance(error, tinker.RequestFailedError)
            else error.status_code in _REFUSED
        )
        if refused:
            raise UserError(f"the Tinker service refuses, while {doing}: {_first_line(error)}") from error
        raise lost(f"the Tinker service failed while {doing}: {_first_line(error)}") from error
    except (tinker.APIConnectionError, RetryableException) as error:
        raise lost(f"the Tinker service cannot be reached while {doing}: {_first_line(error)}") from error
    except tinker.TinkerError as error:
        raise UserError(f"model.tinker, while {doing}: {_first_line(error)}") from error


def ask(
    doing: str,
    call: Callable[[], T],
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
    lost: type[RftError] = ProcessLostError,
) -> T:
    """What `call` returns, which waits for the service without a deadline; arguments and errors as of `result_of`."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # A daemon: one that is not answered keeps no process alive.
    threading.Thread(target=run, name="tinker-call", daemon=True).start()
    return result_of(doing, answer, timeout_s=timeout_s, lost=lost)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def open_sampler(
    service: ServiceClient,
    *,
    base_model: str | None = None,
    path: str | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
    lost: type[RftError] = ProcessLostError,
) -> SamplingClient:
    """A sampler of a base model, or of weights at a path. Raises: as `ask`."""

    def create() -> SamplingClient:
        return service.create_sampling_client(model_path=path, base_model=base_model).result()

    return ask(f"a sampler of {path or base_model} is made", create, timeout_s=timeout_s, lost=lost)


def response_logprobs(
    sampler: SamplingClient,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
    lost: type[RftError] = ProcessLostError,
) -> list[list[float]]:
    """Natural-log probabilities of each token of the second of a pair after the first; neither is empty.

    Raises: as `ask`; `lost`: it does not tell them all.
    """
    from tinker import types  # late, as above

    # All at once, and then one after another: the service works on them side by side.
    answers = [
        sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, *response]), prompt_logprobs_last_n=len(response))
        for prompt, response in pairs
    ]
    told = []
    for (_, response), answer in zip(pairs, answers, strict=True):
        logprobs = result_of("it scores", answer, timeout_s=timeout_s, lost=lost)[-len(response) :]
        known = [value for value in logprobs if value is not None]
        if len(known) != len(response):
            raise lost(f"the Tinker service told {len(known)} logprobs of {len(response)} tokens")
        told.append(known)
    return told


def sampler_file(path: str) -> dict[str, bytes]:
    """The published file for sampler weights at a `tinker://` path."""
    return {SAMPLER_FILE: json.dumps({"sampler_path": path}).encode()}


def read_sampler_path(files: Sequence[Path]) -> str:
    """The path in published files. Raises: DataError: they are no version of a trainer at the service."""
    found = [file for file in files if file.name == SAMPLER_FILE]
    if not found:
        raise DataError(
            f"engine_type tinker loads versions of trainer_type tinker alone, and {', '.join(map(str, files))} is none"
        )
    return sampler_path(found[0].read_bytes())


def sampler_path(data: bytes) -> str:
    """The path in a `sampler_file`."""
    return str(json.loads(data)["sampler_path"])
