"""Calibration against an estimator whose bias is known."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.calibration import MAX_PROBABILITY, MIN_PROBABILITY, Calibration

outcomes = st.lists(
    st.tuples(st.sampled_from([-math.inf, -30.0, -2.0, -0.7, -1e-9, 0.0]), st.integers(0, 9), st.booleans()),
    max_size=60,
)


def probability(calibration: Calibration, p: float, rank: int = 0) -> float:
    return math.exp(calibration.log_prob(math.log(p) if p else -math.inf, rank))


def truth(p: float, slope: float, offset: float) -> float:
    return 1.0 / (1.0 + math.exp(-slope * math.log(p / (1.0 - p)) - offset))


@given(st.floats(0.0, 1.0), st.integers(0, 20))
def test_it_begins_as_the_identity(p, rank):
    found = probability(Calibration(), p, rank)
    assert found == pytest.approx(min(max(p, MIN_PROBABILITY), MAX_PROBABILITY), rel=1e-4)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.5, -0.8), (0.7, 0.6), (1.6, -0.5)])
def test_it_learns_what_a_biased_estimator_is_worth(slope, offset):
    draw, calibration = random.Random(3), Calibration(num_ranks=2)
    for _ in range(6000):
        p = draw.betavariate(1.2, 1.2) * 0.98 + 0.01
        calibration.learn(math.log(p), 0, draw.random() < truth(p, slope, offset))
        # The other rank learns the opposite, and neither disturbs the other.
        calibration.learn(math.log(p), 5, draw.random() < 0.1)
    grid = [0.05 * step for step in range(1, 20)]
    errors = [abs(probability(calibration, p) - truth(p, slope, offset)) for p in grid]
    assert sum(errors) / len(errors) < 0.03
    assert probability(calibration, 0.5, 1) < 0.2


@given(outcomes)
def test_any_outcomes_leave_finite_and_monotone_estimates(outcomes):
    calibration = Calibration()
    for log_prob, rank, came_true in outcomes:
        calibration.learn(log_prob, rank, came_true)
    for rank in range(6):
        found = [probability(calibration, p, rank) for p in (0.0, 1e-9, 0.01, 0.2, 0.5, 0.9, 0.999, 1.0)]
        assert all(low <= high for low, high in itertools.pairwise(found))
        assert found[0] >= MIN_PROBABILITY * (1 - 1e-9)
        assert found[-1] <= MAX_PROBABILITY * (1 + 1e-9)


def test_without_ranks_there_is_nothing_to_learn():
    with pytest.raises(ValueError, match="num_ranks is 0 and must be at least 1"):
        Calibration(num_ranks=0)
