"""Corrects a drafter's estimates by what came true: on-line Platt scaling, apart for each rank of siblings.

It changes how large drafts grow, never a token. It does not know trees or where estimates come from.
"""

import math
from collections.abc import Iterable
from itertools import islice

MIN_PROBABILITY, MAX_PROBABILITY = 1e-6, 0.995
SLOPE_LIMITS = (0.3, 2.0)
OFFSET_LIMITS = (-3.0, 3.0)

LEARNING_RATE = 0.15
FIRST_SQUARES = 4.0
"""What sums of squared gradients begin with, so that the first outcomes do not decide everything."""

MOST_SQUARES = 400.0
"""Where these sums stop, so that the steps never become too small to follow a new kind of text."""

NUM_TAUGHT = 4
"""Children of a place that are learnt from; the others hardly ever come true."""


class Calibration:
    """sigmoid(a * logit(p) + b) for an estimated probability p, with an a and a b for each rank.

    A rank is the place of an estimate among its siblings, from 0 for the likeliest; high ranks share the last
    pair. All begin as the identity and follow the log loss by Adagrad (Platt scaling, 1999, on line). Since a
    stays above 0, the order of two estimates of one rank never changes. One thread at a time.
    """

    def __init__(self, num_ranks: int = 4) -> None:
        """Begins as the identity.

        Raises:
            ValueError: There is no rank.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks} and must be at least 1")
        self._slopes, self._offsets = [1.0] * num_ranks, [0.0] * num_ranks
        self._slope_squares, self._offset_squares = [FIRST_SQUARES] * num_ranks, [FIRST_SQUARES] * num_ranks

    def log_prob(self, log_prob: float, rank: int) -> float:
        """The calibrated estimate.

        Args:
            log_prob: Natural logarithm of the estimate, 0 or less; minus infinity is allowed.
            rank: Its place among its siblings.

        Returns:
            Its natural logarithm, from that of `MIN_PROBABILITY` to that of `MAX_PROBABILITY`.
        """
        rank = min(rank, len(self._slopes) - 1)
        score = self._slopes[rank] * _logit(log_prob) + self._offsets[rank]
        return min(max(-_softplus(-score), _LOWEST), _HIGHEST)

    def learn(self, log_prob: float, rank: int, came_true: bool) -> None:
        """Takes in one outcome.

        Args:
            log_prob: The estimate as it was before calibration.
            rank: Its place among its siblings.
            came_true: Whether the target drew that token after the same path.
        """
        rank = min(rank, len(self._slopes) - 1)
        logit = _logit(log_prob)
        slope, offset = self._slopes[rank], self._offsets[rank]
        by_offset = math.exp(-_softplus(-(slope * logit + offset))) - came_true
        by_slope = by_offset * logit
        squares = min(self._slope_squares[rank] + by_slope * by_slope, MOST_SQUARES)
        self._slope_squares[rank] = squares
        slope -= LEARNING_RATE * by_slope / math.sqrt(squares)
        self._slopes[rank] = min(max(slope, SLOPE_LIMITS[0]), SLOPE_LIMITS[1])
        squares = min(self._offset_squares[rank] + by_offset * by_offset, MOST_SQUARES)
        self._offset_squares[rank] = squares
        offset -= LEARNING_RATE * by_offset / math.sqrt(squares)
        self._offsets[rank] = min(max(offset, OFFSET_LIMITS[0]), OFFSET_LIMITS[1])

    def learn_place(self, children: Iterable[tuple[int, float]], drawn: int) -> None:
        """Takes in which of one place's likeliest children came true, if any.

        Args:
            children: Tokens and the drafter's own estimates, the likeliest first.
            drawn: The token that the target drew.
        """
        for rank, (token_id, log_prob) in enumerate(islice(children, NUM_TAUGHT)):
            self.learn(log_prob, rank, token_id == drawn)


_LOWEST, _HIGHEST = math.log(MIN_PROBABILITY), math.log(MAX_PROBABILITY)


def _logit(log_prob: float) -> float:
    """Of a probability that is neither 0 nor 1."""
    log_prob = min(max(log_prob, _LOWEST), -MIN_PROBABILITY)
    return log_prob - math.log(-math.expm1(log_prob))


def _softplus(score: float) -> float:
    return max(score, 0.0) + math.log1p(math.exp(-abs(score)))
