import asyncio
import contextlib

import grpc
import pytest

from orchestrator.admission import Admission
from stagespec.rpc import RpcError


class Guest:
    """A request that stays until it is told to go."""

    def __init__(self, admission: Admission, log: list[str], name: str, num_tokens: int = 0) -> None:
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay(admission, log, name, num_tokens))

    async def _stay(self, admission: Admission, log: list[str], name: str, num_tokens: int) -> None:
        async with admission.place(num_tokens):
            log.append(name)
            await self.leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_first_come_first_served_and_full_is_refused():
    admission, log = Admission(max_running=1, max_waiting=2, max_wait_s=60), []
    guests = [Guest(admission, log, name) for name in "abc"]
    await settle()
    assert (log, admission.num_running, admission.num_waiting) == (["a"], 1, 2)
    with pytest.raises(RpcError) as refused:
        async with admission.place():
            pass
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
    assert refused.value.retry_after is not None
    for number, guest in enumerate(guests, start=1):
        guest.leave.set()
        await settle()
        assert log == list("abc")[: number + 1]
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    await admission.wait_idle()


async def test_tokens_are_limited_too_and_nobody_overtakes():
    limit, log = [10], []
    admission = Admission(max_running=9, max_waiting=9, max_wait_s=60, max_tokens=lambda: limit[0])
    guests = {
        name: Guest(admission, log, name, size) for name, size in zip("abcde", (6, 5, 3, 99, 1), strict=True)
    }
    await settle()
    assert (log, admission.num_waiting) == (["a"], 4), "c would fit, but b came first"
    guests["b"].task.cancel()
    await settle()
    assert log == ["a", "c"], "who gives up holds nobody up"
    for name in "ac":
        guests[name].leave.set()
    await settle()
    assert log == ["a", "c", "d"], "more than there is runs alone"
    limit[0] = 100  # as after a restart of the verifier; it is read at the next change
    guests["d"].leave.set()
    await settle()
    assert log == ["a", "c", "d", "e"]
    guests["e"].leave.set()
    await admission.wait_idle()
    async with admission.place(100):
        assert admission.num_running == 1


async def test_who_gives_up_waiting_takes_no_place_along():
    admission, log = Admission(max_running=1, max_waiting=5, max_wait_s=60), []
    first, second, third = (Guest(admission, log, name) for name in "abc")
    await settle()
    second.task.cancel()
    await settle()
    assert admission.num_waiting == 1
    # The place comes to the third at the very moment it is cancelled.
    first.leave.set()
    await first.task
    third.task.cancel()
    await settle()
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    async with admission.place():
        assert admission.num_running == 1


async def test_a_long_wait_is_refused():
    admission, log = Admission(max_running=1, max_waiting=5, max_wait_s=0.01), []
    guest = Guest(admission, log, "a")
    await settle()
    with pytest.raises(RpcError) as refused:
        async with admission.place():
            pass
    assert refused.value.reason == "OVERLOADED"
    assert admission.num_waiting == 0
    guest.leave.set()
    await guest.task


async def test_draining_sends_away_who_waits_and_lets_who_runs_end():
    admission, log = Admission(max_running=1, max_waiting=5, max_wait_s=60), []
    running, waiting = Guest(admission, log, "a"), Guest(admission, log, "b")
    await settle()
    admission.drain()
    with pytest.raises(RpcError, match="DRAINING"):
        await waiting.task
    with pytest.raises(RpcError, match="DRAINING"):
        async with admission.place():
            pass
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(admission.wait_idle(), 0.01)
        raise AssertionError("idle while a request runs")
    running.leave.set()
    await admission.wait_idle()
