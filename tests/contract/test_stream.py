"""One stream against a real server: deltas, overdue answers, new openings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from orchestrator.backoff import Backoff
from orchestrator.stage import connect
from orchestrator.stream import Patience, Question, StageError, StageStream
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.drafter_pb2 import ProposeRequest, ProposeResponse
from stagespec.v1.drafter_pb2_grpc import DrafterServiceStub
from tests.fakes import ScriptedDrafter, chain, fail, hang, keep_hint
from tests.serving import codec_of, no_sessions

Stream = StageStream[ProposeRequest, ProposeResponse]


def question(
    context: list[int], step_id: int, round_number: int = 0
) -> Question[ProposeRequest, ProposeResponse]:
    def fill(delta: ContextDelta, epoch: int) -> ProposeRequest:
        hint = chain([step_id])
        return ProposeRequest(step_id=step_id, epoch=epoch, round=round_number, context=delta, hint=hint)

    return Question(
        context, (step_id, round_number), fill, lambda reply: (reply.step_id, reply.round), lambda reply: True
    )


@asynccontextmanager
async def connected(
    script=keep_hint,
    *,
    answer_s: float = 5.0,
    overdue_s: float = 5.0,
    backoff_s: float = 0.001,
    max_backoff_s: float = 0.0,
) -> AsyncIterator[tuple[Stream, ScriptedDrafter]]:
    drafter = ScriptedDrafter("drafter", script, codec_of().vocabulary)
    await drafter.start()
    channel = connect(drafter.address)
    patience = Patience(answer_s, 0.0, overdue_s, Backoff(backoff_s, max(backoff_s, max_backoff_s)))
    stream: Stream = StageStream(lambda: DrafterServiceStub(channel).Propose(), "session", patience)
    try:
        yield stream, drafter
        stream.close()
        await no_sessions(drafter)
    finally:
        await channel.close()
        await drafter.stop()


def sent(drafter: ScriptedDrafter) -> list[tuple[int, list[int]]]:
    return [(delta.base_length, list(delta.token_ids)) for delta in drafter.deltas]


async def retried(stream: Stream, context: list[int], step_id: int) -> list[ProposeResponse]:
    await asyncio.sleep(stream.retry_delay)
    return await stream.ask(question(context, step_id))


async def test_only_what_is_new_is_sent():
    async with connected() as (stream, drafter):
        context = [1, 2, 3]
        [first] = await stream.ask(question(context, 1))
        assert first.draft == chain([1])
        await stream.ask(question(context, 1, 1))
        context += [4, 5]
        await stream.ask(question(context, 2))
        assert sent(drafter) == [(0, [1, 2, 3]), (3, []), (3, [4, 5])]
        assert {delta.session_id for delta in drafter.deltas} == {"session"}
        assert drafter.epochs == [0, 0, 0]


async def test_resync_sends_once_from_where_the_stage_asks():
    async with connected() as (stream, drafter):
        context = [1, 2, 3, 4]
        await stream.ask(question(context, 1))
        answers = iter([ProposeResponse(resync_from=2), None])

        async def forgetful(known, request):
            return next(answers) or request.hint

        drafter.script = forgetful
        context.append(5)
        [reply] = await stream.ask(question(context, 2))
        assert reply.draft == chain([2])
        assert sent(drafter)[1:] == [(4, [5]), (2, [3, 4, 5])]


@pytest.mark.parametrize("resync_from", [-1, 4, 99])
async def test_impossible_resync_breaks_the_stream(resync_from):
    async with connected() as (stream, drafter):
        await stream.ask(question([1, 2, 3, 4], 1))

        async def lie(known, request):
            return ProposeResponse(resync_from=resync_from)

        drafter.script = lie
        with pytest.raises(StageError, match="wants to resync"):
            await stream.ask(question([1, 2, 3, 4], 2))
        assert not stream.is_open


async def test_endless_resync_breaks_the_stream():
    async with connected() as (stream, drafter):
        await stream.ask(question([1, 2, 3, 4], 1))

        async def forget(known, request):
            return ProposeResponse(resync_from=request.context.base_length - 1)

        drafter.script = forget
        with pytest.raises(StageError, match="again and again"):
            await stream.ask(question([1, 2, 3, 4], 2))
        assert drafter.num_requests == 3


async def test_an_overdue_answer_blocks_the_stream_until_it_comes_and_its_context_counts():
    gate = asyncio.Event()

    async def slow(known, request):
        await gate.wait()
        return request.hint

    async with connected(slow, answer_s=0.3) as (stream, drafter):
        context = [1, 2, 3]
        with pytest.raises(StageError) as late:
            await stream.ask(question(context, 1))
        assert late.value.overdue
        assert "overdue" in stream.blocked
        assert stream.is_open
        gate.set()
        while stream.blocked:
            await asyncio.sleep(0.005)
        context.append(4)
        [reply] = await stream.ask(question(context, 2))
        assert reply.draft == chain([2]), "an old answer was taken for a new one"
        assert sent(drafter) == [(0, [1, 2, 3]), (3, [4])]


async def test_an_answer_that_never_comes_is_given_up_for_a_new_stream():
    async with connected(hang, answer_s=0.3, overdue_s=0.05) as (stream, drafter):
        with pytest.raises(StageError):
            await stream.ask(question([1, 2], 1))
        while stream.blocked:
            await asyncio.sleep(0.005)
        drafter.script = keep_hint
        await stream.ask(question([1, 2], 2))
        assert drafter.epochs == [0, 1]
        assert sent(drafter) == [(0, [1, 2]), (0, [1, 2])]
        while drafter.live_sessions > 1:
            await asyncio.sleep(0.005)


async def test_an_error_reopens_the_stream_after_a_pause_with_everything_sent_anew():
    async with connected(fail, backoff_s=0.05) as (stream, drafter):
        with pytest.raises(StageError) as failed:
            await stream.ask(question([1, 2], 1))
        assert failed.value.status is not None
        assert failed.value.status.code is grpc.StatusCode.INTERNAL
        assert "secret" not in str(failed.value.status)
        assert "next attempt" in stream.blocked
        drafter.script = keep_hint
        await retried(stream, [1, 2, 3], 2)
        assert stream.blocked == ""
        assert drafter.epochs == [0, 1]
        assert sent(drafter) == [(0, [1, 2]), (0, [1, 2, 3])]


async def test_an_answer_ends_the_growth_of_the_pause():
    first_s = 0.01
    async with connected(fail, backoff_s=first_s, max_backoff_s=60.0) as (stream, drafter):
        for step_id in range(3):
            with pytest.raises(StageError):
                await retried(stream, [1], step_id)
        drafter.script = keep_hint
        await retried(stream, [1], 4)
        drafter.script = fail
        with pytest.raises(StageError):
            await retried(stream, [1], 5)
        assert stream.retry_delay <= first_s


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ProposeResponse(step_id=3), "answered question"),
        (ProposeResponse(epoch=9), "answered question"),
        (ProposeResponse(round=1), "answered question"),
    ],
)
async def test_an_answer_from_the_future_breaks_the_stream(answer, reason):
    async def lie(known, request):
        return answer

    async with connected(lie) as (stream, drafter):
        with pytest.raises(StageError, match=reason):
            await stream.ask(question([1], 2))
        drafter.script = keep_hint
        await retried(stream, [1], 3)


async def test_answers_to_older_questions_are_dropped():
    async def old(known, request):
        return ProposeResponse(step_id=request.step_id - 1)

    async with connected(old, answer_s=0.3) as (stream, _):
        with pytest.raises(StageError) as late:
            await stream.ask(question([1], 2))
        assert late.value.overdue


async def test_a_stage_that_died_while_idle_is_found_out_and_reached_again():
    async with connected() as (stream, drafter):
        await stream.ask(question([1, 2], 1))
        address = drafter.address
        await drafter.stop()
        with pytest.raises(StageError):
            await stream.ask(question([1, 2], 2))
        await drafter.start(address)
        for _ in range(100):
            try:
                await retried(stream, [1, 2, 3], 3)
                break
            except StageError:
                continue
        assert sent(drafter)[-1] == (0, [1, 2, 3])


async def test_a_question_cut_off_by_cancellation_leaves_no_session():
    async with connected(hang) as (stream, drafter):
        asking = asyncio.create_task(stream.ask(question([1], 1)))
        while not drafter.live_sessions:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        stream.close()
        await no_sessions(drafter)


def test_backoff_grows_to_its_cap_with_jitter():
    backoff = Backoff(0.1, 1.0)
    for num_failures, full in [(1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (10**6, 1.0)]:
        delays = [backoff.delay(num_failures) for _ in range(100)]
        assert full / 2 <= min(delays) < max(delays) <= full
