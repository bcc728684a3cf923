"""When a lost stage may be started again."""

from deploy.config import SupervisionSettings
from deploy.launch import Restarts


def test_restarts_back_off_and_never_exceed_the_rate():
    settings = SupervisionSettings(backoff_s=0.2, max_backoff_s=4.0, max_restarts_per_minute=5)
    now = 0.0
    restarts = Restarts(settings, clock=lambda: now)
    moments = []
    for number in range(30):  # a stage that dies as soon as it serves
        delay = restarts.delay()
        if number < 5:
            assert 0.1 * 2**number <= delay <= min(0.2 * 2**number, 4.0)
        now += delay
        moments.append(now)
    for first, sixth in zip(moments, moments[5:], strict=False):
        assert sixth - first >= 60.0 - 1e-6


def test_the_backoff_starts_over_after_a_quiet_minute():
    now = 0.0
    restarts = Restarts(SupervisionSettings(backoff_s=0.2), clock=lambda: now)
    for _ in range(4):
        now += restarts.delay()
    now += 61.0
    assert restarts.delay() <= 0.2
