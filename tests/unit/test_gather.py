"""Whom a pass waits for: those who will be back in time by their own habit, and nobody else."""

import pytest

from services.gather import Gather


def habit(gather: Gather, session: str, seconds: float, now: float = 0.0) -> None:
    """A session that was away for so long each time, and is away now since `now`."""
    for turn in range(3):
        gather.answered(session, now - 10 + turn)
        gather.asked(session, now - 10 + turn + seconds)
    gather.answered(session, now)


def test_a_session_alone_and_strangers_are_not_waited_for():
    gather = Gather()
    assert gather.deadline(5.0, pass_s=1.0) == 5.0
    gather.answered("new", 4.99)
    assert gather.deadline(5.0, pass_s=1.0) == 5.0


def test_who_is_usually_back_in_time_is_waited_for_twice_as_long_and_no_longer():
    gather = Gather()
    habit(gather, "quick", 0.01)
    assert gather.deadline(0.0, pass_s=1.0) == pytest.approx(0.02)
    assert gather.deadline(0.0, pass_s=0.06) == pytest.approx(0.015)
    assert gather.deadline(0.5, pass_s=1.0) < 0.5 + 1e-9, "given up"
    gather.asked("quick", 0.012)
    assert gather.deadline(0.012, pass_s=1.0) == 0.012


def test_who_is_slow_or_gone_is_not_waited_for():
    gather = Gather()
    habit(gather, "drafts", 0.4)
    habit(gather, "gone", 0.01)
    gather.closed("gone")
    assert gather.deadline(0.0, pass_s=1.0) == 0.0
    assert gather.deadline(0.0, pass_s=2.0) == pytest.approx(0.5)
