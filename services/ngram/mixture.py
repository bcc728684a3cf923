"""The next token's distribution: the session's own context and the memory's texts mixed with the table.

It does not know trees, budgets or noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.ngram.counts import Counts
from services.ngram.katz import Floats
from services.ngram.memory import MIN_MATCH
from services.ngram.session import NgramSession, Tokens
from services.ngram.table import ContextIds, NgramTable

CONTEXT_DISCOUNT = 0.7
"""What each continuation's count in the session's context gives to the shorter match."""

SINGLE_WEIGHT = 0.3
"""Share of the session's single tokens where nothing longer matches: its own names gain on the table's, and
what the table knows of their order still counts."""

NOMINAL_VOCABULARY_SIZE = 1 << 16
"""Stands for the number of token ids where no table tells it."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable next tokens, in falling order of probability, the lower id first at a tie.

    Attributes:
        token_ids: Distinct tokens. [num_candidates]
        probabilities: Their probabilities; what is missing to 1 belongs to all other tokens. [num_candidates]
    """

    token_ids: Counts
    probabilities: Floats


class Mixture:
    """P(w | context) = weight * P_session(w | context) + (1 - weight) * P_table(w | context).

    P_table is the Katz model, or uniform without a table. P_session interpolates matches of the last 1, 2, ..
    tokens in the session's context, the longest one last and strongest, down to single tokens. Matches in the
    memory's texts, which begin at `memory.MIN_MATCH` tokens, count like matches of the same length in the
    context: c_m is the sum of both.

        P_m(w) = (max(c_m(w) - D, 0) + D * distinct_m * P_{m-1}(w)) / total_m    with D = CONTEXT_DISCOUNT,
        P_0(w) = S * c_0(w) / length + (1 - S) * P_table(w)                      with S = SINGLE_WEIGHT.

    All of them are proper distributions, so the mixture is one. A single earlier place that matches m tokens
    gives its continuation 1 - (1 - P_0) D^m.
    """

    def __init__(
        self,
        table: NgramTable | None,
        *,
        context_order: int,
        context_weight: float,
        vocabulary_size: int | None = None,
    ) -> None:
        """Mixes a table with sessions.

        Args:
            table: The table, or None.
            context_order: Length of the longest n-grams to match in a session's context.
            context_weight: Share of the session, from 0 to 1.
            vocabulary_size: Number of token ids if there is no table; None for a nominal number.
        """
        self._table = table
        self._num_matched = context_order - 1
        self._weight = context_weight
        self._uniform = 1.0 / (table.vocabulary_size if table else vocabulary_size or NOMINAL_VOCABULARY_SIZE)
        self.reach = max(self._num_matched, table.order - 1 if table else 0)
        """Tokens before the next one that matter."""

    def candidates(self, session: NgramSession, suffix: Sequence[int], limit: int) -> Candidates:
        """The most probable next tokens.

        They are sought among everything that followed a match in the session or the memory, and among the
        `limit` most frequent continuations of each context in the table. That misses a token only where the
        table has more continuations than `limit`.

        Args:
            session: The session.
            suffix: The last tokens of its context and of the drafted path: `reach` of them, if there are.
            limit: Most tokens to return.
        """
        matches, contexts = self._look_up(session, suffix)
        seen: list[Counts | Tokens] = list(matches[:MIN_MATCH])  # longer matches are among these
        if self._table is not None:
            seen += self._table.leading(contexts, limit)
        if not seen:
            return Candidates(np.empty(0, dtype=np.int64), np.empty(0))
        token_ids = np.unique(np.concatenate(seen)).astype(np.int64)
        probabilities = self._mix(session, matches, contexts, token_ids)
        best = np.argsort(-probabilities, kind="stable")[:limit]
        return Candidates(token_ids[best], probabilities[best])

    def probabilities(self, session: NgramSession, suffix: Sequence[int], token_ids: Counts) -> Floats:
        """Probability of tokens that need not be probable.

        Args:
            session: The session.
            suffix: As for `candidates`.
            token_ids: Tokens in rising order. Those that followed a match must be among them. [num_tokens]

        Returns:
            Their probabilities. [num_tokens]
        """
        return self._mix(session, *self._look_up(session, suffix), token_ids)

    def _look_up(self, session: NgramSession, suffix: Sequence[int]) -> tuple[list[Tokens], ContextIds]:
        suffix_matched = suffix[-self._num_matched :]
        own: dict[int, Tokens] = dict(enumerate(session.continuations(suffix_matched), start=1))
        others = dict(enumerate(session.remembered(suffix_matched), start=MIN_MATCH))
        # By length. The context may have shorter matches than the memory, and longer ones.
        lengths = sorted(own | others)
        matches = [np.concatenate([found[m] for found in (own, others) if m in found]) for m in lengths]
        return matches, self._table.find(suffix) if self._table is not None else []

    def _mix(
        self, session: NgramSession, matches: list[Tokens], contexts: ContextIds, token_ids: Counts
    ) -> Floats:
        if self._table is not None:
            from_table = self._table.probabilities(contexts, token_ids)
        else:
            from_table = np.full(len(token_ids), self._uniform)
        from_session = from_table
        if len(session):
            frequencies = session.occurrences(token_ids.tolist()) / len(session)
            from_session = SINGLE_WEIGHT * frequencies + (1.0 - SINGLE_WEIGHT) * from_table
        for followed in matches:
            counts = np.bincount(np.searchsorted(token_ids, followed), minlength=len(token_ids))
            kept = np.maximum(counts - CONTEXT_DISCOUNT, 0.0)
            given = CONTEXT_DISCOUNT * np.count_nonzero(counts)
            from_session = (kept + given * from_session) / len(followed)
        mixed: Floats = self._weight * from_session + (1.0 - self._weight) * from_table
        return mixed
