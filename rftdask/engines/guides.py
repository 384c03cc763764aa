"""Guides: which tokens a response may go on with, where a request asks for a form or names what must not come.

A guide follows one response and knows no logits. The form is a grammar of llguidance, which vLLM has, too; it is
imported late, since it is optional. Invariant: what may come next is asked after each token, so a response that ended
by itself has the form, and one that met its limit is the beginning of one that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rftdask.engines.base import SamplingParams
from rftdask.errors import RoleError, UserError


class Guides:
    """Makes the guides of one model's responses.

    Args: tokenizer: of the model, a fast one of transformers; num_tokens: V, rows of its embedding; end_ids: tokens
        that end a response.
    """

    def __init__(self, tokenizer: Any, num_tokens: int, end_ids: Sequence[int]) -> None:
        self._tokenizer, self._num_tokens, self._end_ids = tokenizer, num_tokens, list(end_ids)
        self._for_grammars: Any = None

    def guide(self, sampling: SamplingParams) -> Guide:
        """The guide of a response that begins. Raises: RoleError: the grammar is none; UserError: no llguidance."""
        matcher = None
        if sampling.grammar:
            try:
                import llguidance
                import llguidance.hf
            except ImportError as error:
                raise UserError(f"a guided answer needs llguidance: pip install 'rftdask[train]' ({error})") from error
            if self._for_grammars is None:  # it takes a second with a large vocabulary
                self._for_grammars = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._num_tokens)
            grammar = llguidance.LLMatcher.grammar_from_lark(sampling.grammar)
            matcher = llguidance.LLMatcher(self._for_grammars, grammar, log_level=0)
            if matcher.is_error():
                raise RoleError(f"no answer can be guided by this grammar: {matcher.get_error()}")
        return Guide(matcher, sampling.bad_tokens, self._num_tokens, self._end_ids)


class Guide:
    """What one response may go on with."""

    def __init__(
        self, matcher: Any, bad_tokens: Sequence[Sequence[int]], num_tokens: int, end_ids: Sequence[int]
    ) -> None:
        self._matcher, self._bad_tokens, self._num_tokens, self._end_ids = matcher, bad_tokens, num_tokens, end_ids
        self._taken: list[int] = []

    def allowed(self) -> np.ndarray:
        """[V] bool: the tokens that may come next. At least one: where nothing else may, the response may end."""
        allowed_V = np.ones(self._num_tokens, bool)
        if self._matcher is not None and self._matcher.is_error():  # of its limits: what was said cannot go on
            allowed_V[:] = False
        elif self._matcher is not None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            found = np.unpackbits(bits, bitorder="little")[: self._num_tokens].astype(bool)
            allowed_V[:] = False
            allowed_V[: len(found)] = found
            # The package knows one end token of those that a model may have.
            allowed_V[self._end_ids] = self._matcher.is_accepting()
        for tokens in self._bad_tokens:
            before = list(tokens[:-1])
            if self._taken[len(self._taken) - len(before) :] == before:
                allowed_V[tokens[-1]] = False
        if not allowed_V.any():
            allowed_V[self._end_ids] = True
        return allowed_V

    def take(self, token: int) -> None:
        """Go on by a token that was allowed."""
        self._taken.append(token)
        if self._matcher is not None and token not in self._end_ids:
            self._matcher.consume_token(token)
