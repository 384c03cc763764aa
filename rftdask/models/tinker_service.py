"""Tinker service: requests with deadlines, and the file that names weights stored at the service.

Every wait has a deadline, and every error of the SDK becomes one of ours: a rejected request is a UserError, a missing
answer is an error that a retry may avoid. The SDK itself retries lost requests for five minutes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftdask.errors import DataError, NotInstalledError, ProcessLostError, RftError, UserError
from rftdask.storage.base import in_daemon

if TYPE_CHECKING:
    from tinker import SamplingClient, ServiceClient

API_KEY = "TINKER_API_KEY"
"""Environment variable with the key, which is stored nowhere else."""
SAMPLER_FILE = "sampler.json"
"""Published in place of weights: their path at the service."""
SEEDS = 2**31
"""Upper bound of the service's seeds."""
ANSWER_TIMEOUT_S = 1200.0
"""Seconds to wait for one answer of the service, which queues requests for minutes when it is busy; shorter than the
heartbeat timeout of a trainer rank."""
_REFUSED = (400, 401, 402, 403, 404, 405, 413, 422)  # status codes that a retry would get again


def require_key() -> str:
    """Return the key. Raises: UserError: it is not set."""
    key = os.environ.get(API_KEY, "")
    if not key:
        raise UserError(f"model.tinker: the service needs a key; export {API_KEY}=tml-... before starting the run")
    return key


class TinkerService:
    """A session at the service, which ends with this process. Every request has a deadline."""

    def __init__(
        self, base_url: str | None, *, timeout_s: float = ANSWER_TIMEOUT_S, lost: type[RftError] = ProcessLostError
    ) -> None:
        """
        Args: base_url: None: the hosted service. lost: error to raise if the service fails or does not answer.
        Raises: UserError: no key, no package, or the service rejects the request; `lost`.
        """
        key = require_key()
        try:
            from tinker import ServiceClient  # late: an optional package
        except ImportError as error:
            raise NotInstalledError(
                f"model.tinker needs the package tinker: pip install 'rftdask[tinker]' ({error})"
            ) from error
        self._timeout_s, self._lost = timeout_s, lost

        def connect() -> ServiceClient:
            service = ServiceClient(base_url=base_url, api_key=key)
            service.holder  # noqa: B018 (opens the session, which otherwise waits for the first request)
            return service

        self.client = self.ask("opening a session", connect)

    def result_of(self, doing: str, answer: Any, timeout_s: float | None = None) -> Any:
        """Wait for a future of the SDK. doing: the request, for error texts: "while <doing>".

        Raises: UserError: the service rejects the request; `lost`; errors of the answer itself.
        """
        import tinker  # late, as above
        from tinker.lib.retryable_exception import RetryableException

        lost, timeout_s = self._lost, self._timeout_s if timeout_s is None else timeout_s
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
                raise UserError(
                    f"the Tinker service rejected the request while {doing}: {_first_line(error)}"
                ) from error
            raise lost(f"the Tinker service failed while {doing}: {_first_line(error)}") from error
        except (tinker.APIConnectionError, RetryableException) as error:
            raise lost(f"the Tinker service cannot be reached while {doing}: {_first_line(error)}") from error
        except tinker.TinkerError as error:
            raise UserError(f"model.tinker, while {doing}: {_first_line(error)}") from error

    def ask(self, doing: str, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Call a function of the SDK that has no deadline of its own; arguments and errors as in `result_of`."""
        return self.result_of(doing, in_daemon(call, "tinker-call"), timeout_s)

    def open_sampler(self, *, base_model: str | None = None, path: str | None = None) -> SamplingClient:
        """Create a sampler of a base model, or of weights at a path. Raises: see `result_of`."""

        def create() -> SamplingClient:
            return self.client.create_sampling_client(model_path=path, base_model=base_model).result()

        return self.ask(f"creating a sampler of {path or base_model}", create)

    def response_logprobs(
        self, sampler: SamplingClient, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[list[float]]:
        """Return natural-log probabilities of each response token after its prompt, for (prompt, response) pairs.

        Prompts and responses must not be empty. Raises: see `result_of`; `lost`: some are missing.
        """
        from tinker import types  # late, as above

        # All requests are sent before waiting: the service works on them in parallel.
        answers = [
            sampler.compute_logprobs(
                types.ModelInput.from_ints([*prompt, *response]), prompt_logprobs_last_n=len(response)
            )
            for prompt, response in pairs
        ]
        results = []
        for (_, response), answer in zip(pairs, answers, strict=True):
            logprobs = self.result_of("scoring responses", answer)[-len(response) :]
            known = [value for value in logprobs if value is not None]
            if len(known) != len(response):
                raise self._lost(f"the Tinker service returned {len(known)} logprobs for {len(response)} tokens")
            results.append(known)
        return results


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:500]


def sampler_file(path: str) -> dict[str, bytes]:
    """Return the file to publish for sampler weights at a `tinker://` path."""
    return {SAMPLER_FILE: json.dumps({"sampler_path": path}).encode()}


def read_sampler_path(files: Sequence[Path]) -> str:
    """Read the path in published files. Raises: DataError: another trainer published them."""
    file = next((file for file in files if file.name == SAMPLER_FILE), None)
    if file is None:
        raise DataError(
            f"engine_type tinker only loads versions of trainer_type tinker, not {', '.join(map(str, files))}"
        )
    return sampler_path(file.read_bytes())


def sampler_path(data: bytes) -> str:
    """Return the path in a `sampler_file`."""
    return str(json.loads(data)["sampler_path"])
