"""Stages that hang, lie, die and come back while a generation runs: the tokens stay the same."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from stagespec.rpc import RpcError
from stagespec.v1.drafter_pb2 import ProposeResponse
from stagespec.v1.generation_pb2_grpc import GenerationServiceStub
from stagespec.v1.observation_pb2 import Candidates, ElementType, Observation, ObservationRequest
from stagespec.v1.pipeline_pb2 import GetPipelineRequest, StageState
from stagespec.v1.verifier_pb2 import VerifyRequest, VerifyResponse
from tests.fakes import Script, ScriptedDrafter, TableVerifier, fail, hang, oracle, random_target, wrong_step
from tests.serving import (
    HASTY,
    PATIENT,
    Generated,
    codec_of,
    make_request,
    no_sessions,
    read_all,
    read_until_error,
    serve,
)

CODEC = codec_of()
SIZE = len(CODEC.vocabulary.tokens)
TARGET = random_target(SIZE)
SEED = {"temperature": 1.0, "seed": 11}
OFF = {"enabled": False}
FULL = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_FULL", "no room", retry_after=0.01)


def verifier(**info: Any) -> TableVerifier:
    return TableVerifier(TARGET, CODEC.vocabulary, **info)


def drafter(name: str, script: Script, **info: Any) -> ScriptedDrafter:
    return ScriptedDrafter(name, script, CODEC.vocabulary, **info)


async def run(o: Any, num_tokens: int = 60, **fields: Any) -> Generated:
    return await o.generate(sampling=SEED, stop={"max_tokens": num_tokens}, **fields)


async def expected(num_tokens: int = 60) -> list[int]:
    async with serve(CODEC, verifier()) as o:
        return (await run(o, num_tokens)).token_ids


class Gate:
    """Stops a generation after so many verify steps, so that something can happen to it."""

    def __init__(self, fake: TableVerifier, at_step: int) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self._at_step = at_step
        fake.before_answer = self._wait

    async def _wait(self, request: VerifyRequest) -> None:
        if request.step_id == self._at_step:
            self.reached.set()
            await self.go_on.wait()


# Drafters


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (hang, "no answer"),
        (fail, "INTERNAL"),
        (wrong_step(+1), "answered question"),
        (wrong_step(-2), "no answer"),
    ],
)
async def test_a_drafter_that_gives_no_answer_is_skipped_and_counted(script, reason):
    bad, good = drafter("bad", script), drafter("good", oracle(TARGET, 2))
    async with serve(CODEC, verifier(), [good, bad], timeouts=HASTY) as o:
        generated = await run(o)
        assert generated.token_ids == await expected()
        kept, lost = generated.end.speculation.drafters
        assert kept.num_accepted > 0
        assert lost.num_skipped_steps == generated.end.speculation.num_steps
        assert lost.num_failures >= 1
        assert lost.num_proposed == 0
        assert lost.skip_reason
        shown = (await o.pipeline.GetPipeline(GetPipelineRequest())).drafters[1]
        assert shown.totals.num_failures == lost.num_failures
        if reason == "no answer":
            assert (lost.num_failures, lost.num_calls) == (1, 1), "requests piled up at a drafter that hangs"
            assert (shown.state, shown.idle_reason) == (StageState.STAGE_STATE_IDLE, "no answer in time")


async def test_a_drafter_without_room_is_skipped_until_it_has_some():
    right, full = oracle(TARGET, 3), True

    async def script(context: tuple[int, ...], request: Any) -> Any:
        if full:
            raise FULL
        return await right(context, request)

    async with serve(CODEC, verifier(), [drafter("draft", script)]) as o:
        generated = await run(o)
        assert generated.token_ids == await expected()
        [stats] = generated.end.speculation.drafters
        # The last step has no room for a draft, so nobody is missed in it.
        assert stats.num_skipped_steps == generated.end.speculation.num_steps - 1
        assert 1 <= stats.num_failures < stats.num_skipped_steps, "it is not asked again at once"
        full = False
        again = await run(o)
        assert again.token_ids == generated.token_ids
        assert again.end.speculation.num_accepted > 0


async def test_a_verifier_without_room_is_waited_for():
    fake = verifier()
    num_refused = 0

    async def refuse_twice(request: VerifyRequest) -> None:
        nonlocal num_refused
        if request.step_id == 4 and num_refused < 2:
            num_refused += 1
            raise FULL

    fake.before_answer = refuse_twice
    async with serve(CODEC, fake) as o:
        assert (await run(o)).token_ids == await expected()
    assert num_refused == 2


async def test_new_requests_don_t_wait_for_a_drafter_that_hangs():
    bad = drafter("bad", hang)
    # One deadline is paid; the pause after it is long enough for the rest of the test.
    slow = replace(HASTY, backoff_s=60.0, max_backoff_s=60.0)
    async with serve(CODEC, verifier(), [bad], timeouts=slow) as o:
        await run(o, 10)
        second = await run(o, 10)
        assert bad.num_requests == 1
        [stats] = second.end.speculation.drafters
        # The last step has no room for a draft, so nobody is missed in it.
        assert (stats.num_calls, stats.num_skipped_steps) == (0, 9)
        assert stats.skip_reason == "no answer in time"


async def test_a_late_answer_is_dropped_and_the_drafter_is_used_again():
    fake, late = verifier(), asyncio.Event()
    right = oracle(TARGET, 3)

    async def slow_at_first(context: tuple[int, ...], request: Any) -> Any:
        if request.step_id == 1:
            await late.wait()
        return await right(context, request)

    async def answer_at_step_5(request: VerifyRequest) -> None:
        if request.step_id == 5:
            late.set()
            await asyncio.sleep(0.1)

    fake.before_answer = answer_at_step_5
    draft = drafter("draft", slow_at_first)
    async with serve(CODEC, fake, [draft], timeouts=HASTY) as o:
        generated = await run(o)
        assert generated.token_ids == await expected()
        [stats] = generated.end.speculation.drafters
        assert stats.num_accepted > 20
        assert stats.num_failures == 1
        # The context that went with the late question is not sent again.
        assert draft.epochs[:2] == [0, 0]
        assert [delta.base_length for delta in draft.deltas[:2]] == [0, 3]


async def test_a_killed_drafter_is_used_again_after_its_restart_elsewhere():
    fake = verifier()
    dead, alive = drafter("draft", oracle(TARGET, 2)), drafter("draft", oracle(TARGET, 2))
    gate = Gate(fake, at_step=5)
    async with serve(CODEC, fake, [dead], timeouts=PATIENT) as o:
        generation = asyncio.create_task(run(o))
        await gate.reached.wait()
        await dead.stop()
        second = Gate(fake, at_step=10)
        gate.go_on.set()
        await second.reached.wait()
        shown = (await o.pipeline.GetPipeline(GetPipelineRequest())).drafters[0]
        assert shown.state == StageState.STAGE_STATE_DOWN
        assert shown.idle_reason
        await alive.start()
        assert await o.server.pipeline.relocate("draft", dead.address, alive.address)
        second.go_on.set()
        generated = await generation
        assert generated.token_ids == await expected()
        [stats] = generated.end.speculation.drafters
        assert stats.num_failures >= 1
        assert 0 < stats.num_skipped_steps < generated.end.speculation.num_steps
        assert alive.num_requests > 0
        assert alive.deltas[0].base_length == 0, "a new stage must be told everything"
        shown = (await o.pipeline.GetPipeline(GetPipelineRequest())).drafters[0]
        assert (shown.state, shown.totals.num_restarts) == (StageState.STAGE_STATE_READY, 1)
        await no_sessions(alive)
    await alive.stop()


async def test_an_answer_that_cannot_be_parsed_costs_one_step():
    draft = drafter("draft", oracle(TARGET, 2))
    server = grpc.aio.server()

    async def garbage(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b"\xff\xff\xff"

    handler = grpc.stream_stream_rpc_method_handler(garbage)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("stagespec.v1.DrafterService", {"Propose": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with serve(CODEC, verifier(), [draft]) as o:
        stage = o.server.pipeline.drafters[0]
        await stage.move("", grpc.aio.insecure_channel(f"127.0.0.1:{port}"), stage.info)
        generated = await run(o)
        assert generated.token_ids == await expected()
        [stats] = generated.end.speculation.drafters
        assert stats.num_accepted == 0
        assert stats.num_failures > 0
    await server.stop(None)


async def test_forged_owners_are_not_believed():
    async def thief(context: tuple[int, ...], request: Any) -> ProposeResponse:
        hint = request.hint
        response = ProposeResponse(draft=hint)
        response.draft.drafter_indices[:] = [request.drafter_index] * len(hint.token_ids)
        return response

    async with serve(CODEC, verifier(), [drafter("worker", oracle(TARGET)), drafter("thief", thief)]) as o:
        generated = await run(o)
    worker, robbed = generated.end.speculation.drafters
    assert worker.num_accepted > 0
    assert (robbed.num_proposed, robbed.num_accepted) == (0, 0)
    assert "thief" not in generated.origins


# The verifier


async def test_a_verifier_that_lost_context_is_sent_what_it_lacks():
    fake = verifier()
    fake.forget_at_step = 4
    async with serve(CODEC, fake, [drafter("draft", oracle(TARGET, 2))]) as o:
        generated = await run(o)
    assert generated.token_ids == await expected()
    assert set(fake.epochs) == {0}, "a resync needs no new stream"
    assert generated.end.speculation.num_steps == len(fake.deltas) - 1


@pytest.mark.parametrize("at_step", [1, 5])
@pytest.mark.parametrize("same_address", [False, True])
async def test_a_killed_verifier_goes_on_elsewhere_with_the_same_tokens(at_step, same_address):
    dead, alive = verifier(), verifier()
    gate = Gate(dead, at_step)
    async with serve(CODEC, dead, [drafter("draft", oracle(TARGET, 2))]) as o:
        generation = asyncio.create_task(run(o))
        await gate.reached.wait()
        address = dead.address
        await dead.stop()
        await alive.start(address if same_address else "127.0.0.1:0")
        if not same_address:
            assert await o.server.pipeline.relocate("target", address, alive.address)
        generated = await generation
        assert generated.token_ids == await expected()
        assert alive.deltas[0].base_length == 0
        assert alive.epochs[0] > 0
        await no_sessions(alive)
        assert alive.complaints == []
    await alive.stop()


async def test_a_verifier_that_hangs_is_asked_again_on_a_new_stream():
    fake, hung = verifier(), False

    async def hang_once(request: VerifyRequest) -> None:
        nonlocal hung
        if request.step_id == 3 and not hung:
            hung = True
            await asyncio.Event().wait()

    fake.before_answer = hang_once
    impatient = replace(PATIENT, verify_s=0.3, verify_per_token_s=0.0)
    async with serve(CODEC, fake, timeouts=impatient) as o:
        generated = await run(o, 10)
    assert generated.token_ids == await expected(10)
    assert 1 in fake.epochs


async def test_a_verifier_that_stays_away_is_an_error_and_what_was_sent_is_right():
    fake = verifier()
    gate = Gate(fake, at_step=5)
    brief = replace(PATIENT, verifier_recovery_s=0.2)
    async with serve(CODEC, fake, timeouts=brief) as o:
        call = o.generation.Generate(make_request(sampling=SEED, stop={"max_tokens": 60}))
        reading = asyncio.create_task(read_until_error(call))
        await gate.reached.wait()
        await fake.stop()
        got, error = await reading
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "VERIFIER_LOST")
        assert got == (await expected())[:4]
        assert fake.live_sessions == 0
        # The next request is served as soon as the verifier is.
        fake.before_answer = None
        old_address = fake.address
        await fake.start()
        await o.server.pipeline.relocate("target", old_address, fake.address)
        assert (await run(o, 10)).token_ids == (await expected())[:10]


def edit(**changes: Any) -> Any:
    """Changes the verdict of the third step."""

    def tamper(request: VerifyRequest, response: VerifyResponse) -> list[VerifyResponse]:
        if request.step_id == 3:
            for name, value in changes.items():
                if isinstance(value, list):
                    del getattr(response.verdict, name)[:]
                    getattr(response.verdict, name).extend(value)
                else:
                    setattr(response.verdict, name, value)
        return [response]

    return tamper


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3]},
        {"token_ids": []},
        {"accepted_nodes": [7]},
        {"bonus_token_id": 99, "token_ids": [99], "accepted_nodes": []},
        {"logprobs": []},
    ],
)
async def test_an_impossible_verdict_is_an_error_and_never_sent(changes):
    fake = verifier()
    fake.tamper = edit(**changes)
    async with serve(CODEC, fake, [drafter("draft", oracle(TARGET, 1))]) as o:
        call = o.generation.Generate(make_request(sampling=SEED, num_logprobs=0, stop={"max_tokens": 60}))
        got, error = await read_until_error(call)
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "BROKEN_VERDICT")
        assert got == (await expected())[:4]
        fake.tamper = None
        assert (await run(o, 10)).token_ids == (await expected())[:10]


async def test_a_verifier_that_fails_on_one_request_fails_that_one_alone():
    fake = verifier()

    async def fail_on_long(request: VerifyRequest) -> None:
        if request.sampling.prompt_length > 10:
            raise RuntimeError("a secret of the verifier")

    fake.before_answer = fail_on_long
    async with serve(CODEC, fake) as o:
        other = asyncio.create_task(run(o, 30))
        error = await o.refusal(make_request([1] * 20))
        assert error.code is grpc.StatusCode.INTERNAL
        assert error.reason == "VERIFIER_FAILED"
        assert "secret" not in error.message
        assert (await other).token_ids == (await expected())[:30]


async def test_a_verifier_that_refuses_one_request_is_not_in_trouble():
    fake = verifier()

    async def refuse(request: VerifyRequest) -> None:
        raise RpcError(grpc.StatusCode.INTERNAL, "NUMERICAL_ERROR", "the logits are not numbers")

    fake.before_answer = refuse
    async with serve(CODEC, fake) as o:
        assert (await o.refusal(make_request())).reason == "NUMERICAL_ERROR"
        shown = (await o.pipeline.GetPipeline(GetPipelineRequest())).verifier
        assert (shown.state, shown.idle_reason) == (StageState.STAGE_STATE_READY, "")


async def test_a_verifier_without_room_is_waited_for_and_says_so_if_that_lasts():
    fake, num_refusals = verifier(), 5

    async def full(request: VerifyRequest) -> None:
        nonlocal num_refusals
        if num_refusals:
            num_refusals -= 1
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS", "full", retry_after=1.0)

    fake.before_answer = full
    async with serve(CODEC, fake) as o:
        assert (await run(o, 10)).token_ids == await expected(10)
    num_refusals = 10**9
    async with serve(CODEC, fake, timeouts=replace(PATIENT, verifier_recovery_s=0.05)) as o:
        error = await o.refusal(make_request())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")
        assert error.retry_after == 1.0


# Cancelling


@pytest.mark.parametrize("at_step", [1, 4])
@pytest.mark.parametrize("how", ["cancel", "close the channel", "deadline"])
async def test_a_client_that_goes_away_frees_every_stage(at_step, how):
    fake, drafters = verifier(), [drafter("a", oracle(TARGET, 1)), drafter("b", oracle(TARGET, 2))]
    gate = Gate(fake, at_step)
    async with serve(CODEC, fake, drafters) as o:
        channel = grpc.aio.insecure_channel(o.address)
        call = GenerationServiceStub(channel).Generate(
            make_request([5] * 30, sampling=SEED, stop={"max_tokens": 1000}),
            timeout=1.0 if how == "deadline" else None,
        )
        reading = asyncio.create_task(read_all(call))
        await gate.reached.wait()
        assert [stage.live_sessions for stage in (fake, *drafters)] == [1, 1, 1]
        if how == "cancel":
            call.cancel()
        elif how == "close the channel":
            await channel.close()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        await no_sessions(fake, *drafters)
        num_verified = fake.num_requests
        gate.go_on.set()
        again = await run(o, 20)
        assert again.token_ids == (await expected())[:20]
        assert fake.num_requests - num_verified == again.end.speculation.num_steps
        await channel.close()


async def test_a_client_that_stops_reading_and_goes_away_frees_every_stage():
    fake = verifier()
    async with serve(CODEC, fake) as o:
        call = o.generation.Generate(make_request(sampling=SEED, stop={"max_tokens": 100_000}))
        await call.read()
        while fake.num_requests < 50:
            await asyncio.sleep(0.005)
        call.cancel()
        await no_sessions(fake)


# Observations


async def test_observations_reach_the_drafters_that_asked():
    fake = verifier(hidden_size=2)
    half = ElementType.ELEMENT_TYPE_FLOAT16
    hidden = drafter("hidden", oracle(TARGET, 1), observations=ObservationRequest(hidden_states=half))
    nosy = drafter("nosy", oracle(TARGET, 2), observations=ObservationRequest(num_candidates=2))
    plain = drafter("plain", oracle(TARGET, 3))

    def observe(request: VerifyRequest, response: VerifyResponse) -> list[VerifyResponse]:
        assert request.observations == ObservationRequest(hidden_states=half, num_candidates=2)
        pieces = [
            VerifyResponse(
                step_id=request.step_id,
                epoch=request.epoch,
                observations=[
                    Observation(
                        first_position=10 * request.step_id + i,
                        num_positions=1,
                        element_type=half,
                        hidden_states=bytes(4),
                        candidates=[Candidates(token_id=i, candidate_ids=[1, 2])],
                    )
                ],
            )
            for i in range(2)
        ]
        return [*pieces, response]

    fake.tamper = observe
    async with serve(CODEC, fake, [hidden, nosy, plain]) as o:
        generated = await run(o, 20)
        assert generated.token_ids == (await expected())[:20]
    assert [o.first_position for o in hidden.requests[1].observations] == [10, 11]
    assert [o.first_position for o in hidden.requests[2].observations] == [20, 21]
    assert all(not o.candidates for r in hidden.requests for o in r.observations)
    assert [o.candidates[0].token_id for o in nosy.requests[1].observations] == [0, 1]
    assert all(not o.hidden_states for r in nosy.requests for o in r.observations)
    assert not any(request.observations for request in plain.requests)


async def test_wishes_that_cannot_be_granted_do_not_reach_the_verifier():
    fake, asked = verifier(hidden_size=2), []

    def note(request: VerifyRequest, response: VerifyResponse) -> list[VerifyResponse]:
        asked.append(request.observations)
        return [response]

    fake.tamper = note
    unknown: Any = 99  # protobuf carries values of an enum that nobody has named yet
    wishes = {
        "format": (ObservationRequest(hidden_states=unknown), ObservationRequest()),
        "below 0": (ObservationRequest(num_candidates=-1), ObservationRequest()),
        "endless": (ObservationRequest(num_candidates=2**31 - 1), ObservationRequest(num_candidates=64)),
    }
    for name, (wish, granted) in wishes.items():
        async with serve(CODEC, fake, [drafter(name, oracle(TARGET, 3), observations=wish)]) as o:
            await run(o, 10)
        assert all(request == granted for request in asked), name
        asked.clear()


async def test_nothing_is_observed_unless_asked_for():
    fake = verifier()

    def none(request: VerifyRequest, response: VerifyResponse) -> list[VerifyResponse]:
        assert request.observations == ObservationRequest()
        return [response]

    fake.tamper = none
    async with serve(CODEC, fake, [drafter("draft", oracle(TARGET, 3))]) as o:
        await run(o, 10)
