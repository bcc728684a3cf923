"""A stage over real gRPC: the state rule, the limits, the answers to peers that break the contract."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.engine import Job, Proposal, ProposeTask
from services.host import StageServer
from stagespec.rpc import channel_options, describe
from stagespec.tree import DraftTree
from stagespec.v1 import drafter_pb2, stage_pb2
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.draft_pb2 import DraftTree as DraftTreeMessage
from stagespec.v1.drafter_pb2_grpc import DrafterServiceStub
from stagespec.v1.stage_pb2_grpc import StageServiceStub
from stagespec.vocabulary import Vocabulary


class EchoSession:
    def __init__(self, live: set["EchoSession"]) -> None:
        self.context: list[int] = []
        self._live = live
        live.add(self)

    def apply(self, base_length: int, token_ids: Sequence[int]) -> None:
        self.context[base_length:] = token_ids

    def close(self) -> None:
        self._live.discard(self)


class EchoEngine:
    """Proposes its own context, so that an answer shows what the stage believes. Token 7 is a fault."""

    def __init__(self) -> None:
        self.live: set[EchoSession] = set()
        self.tenants: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.info = stage_pb2.StageInfo(
            kind=stage_pb2.STAGE_KIND_DRAFTER,
            vocabulary_size=100,
            max_context_length=20,
            max_nodes=6,
            can_rollback=True,
        )
        self.vocabulary = Vocabulary((b"a", b"\xff", b"<s>"), frozenset({2}))

    @property
    def counters(self) -> dict[str, int]:
        return {"echoes_live": len(self.live)}

    def new_session(self, tenant: str = "") -> EchoSession:
        self.tenants.append(tenant)
        return EchoSession(self.live)

    def run(self, jobs: Sequence[Job[EchoSession, ProposeTask, Proposal]]) -> None:
        self.gate.wait(10)
        for job in jobs:
            context = job.session.context
            if 7 in context:
                job.error = RuntimeError("secret /etc/path")
                continue
            size = len(context)
            job.answer = Proposal(
                DraftTree(tuple(context), tuple(range(-1, size - 1)), (0.0,) * size, (0,) * size)
            )


@asynccontextmanager
async def hosted(max_sessions: int = 4) -> AsyncIterator[tuple[EchoEngine, StageServer, grpc.aio.Channel]]:
    engine = EchoEngine()
    server = StageServer("echo", engine, max_sessions=max_sessions)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield engine, server, channel
    await server.stop(1.0)
    assert not engine.live


def request(base: int, token_ids: Sequence[int], **fields) -> drafter_pb2.ProposeRequest:
    session_id = fields.pop("session_id", "s")
    return drafter_pb2.ProposeRequest(
        context=ContextDelta(session_id=session_id, base_length=base, token_ids=token_ids), **fields
    )


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_context_deltas_truncate_append_and_ask_for_what_is_missing():
    async with hosted() as (_, _, channel):
        call = DrafterServiceStub(channel).Propose()
        context: list[int] = []
        for step, (base, token_ids) in enumerate(
            [(0, [1, 2, 3]), (3, [4]), (1, [5, 6]), (1, [5, 6]), (0, [])]
        ):
            await call.write(request(base, token_ids, step_id=step, epoch=3, round=1))
            answer = await call.read()
            context[base:] = token_ids
            assert list(answer.draft.token_ids) == context
            assert (answer.step_id, answer.epoch, answer.round) == (step, 3, 1)
        await call.write(request(5, [9], step_id=9))
        answer = await call.read()
        assert (answer.resync_from, answer.step_id, len(answer.draft.token_ids)) == (0, 9, 0)
        assert answer.HasField("resync_from")
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF


@pytest.mark.parametrize(
    ("bad", "field", "says"),
    [
        (request(-1, []), "context.base_length", "-1"),
        (request(0, [1, 100]), "context.token_ids", "100 is not in [0, 100)"),
        (request(0, [-5]), "context.token_ids", "-5"),
        (request(0, [1] * 21), "context", "21 tokens and the limit is 20"),
        (request(0, [1], sampling={"top_k": 0}), "sampling.top_k", "0 is not in [1, inf)"),
        (request(0, [1], sampling={"presence_penalty": float("nan")}), "sampling.presence_penalty", "nan"),
        (request(0, [1], sampling={"logit_bias": {3: float("inf")}}), "sampling.logit_bias[3]", "inf"),
        (request(0, [1], session_id="other"), "context.session_id", "'other' on the stream of session 's'"),
    ],
)
async def test_what_breaks_the_contract_is_named(bad, field, says):
    async with hosted() as (engine, _, channel):
        call = DrafterServiceStub(channel).Propose()
        await call.write(request(0, [1, 2]))
        await call.read()
        await call.write(bad)
        error = describe(await failure(call))
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in error.violations] == [field]
        assert says in error.violations[0].description
        await asyncio.sleep(0.05)
        assert not engine.live, "the end of a stream frees its session"


async def test_faults_are_told_without_their_text_and_end_one_stream_only(caplog):
    async with hosted() as (_, _, channel):
        stub = DrafterServiceStub(channel)
        good, bad = stub.Propose(), stub.Propose()
        await good.write(request(0, [1]))
        await good.read()
        await bad.write(request(0, [7]))
        error = await failure(bad)
        assert (error.code(), describe(error).reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "secret" not in str(error.details())
        assert "secret /etc/path" in caplog.text
        await good.write(request(1, [2]))
        assert list((await good.read()).draft.token_ids) == [1, 2]
        good.cancel()
        raw = channel.stream_stream("/stagespec.v1.DrafterService/Propose")()
        await raw.write(b"\xff\xff\xff\xff")
        error = await failure(raw)
        assert (error.code(), describe(error).reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
        )


async def test_sessions_are_bounded_and_draining_takes_no_more():
    async with hosted(max_sessions=2) as (_, _, channel):
        stub = DrafterServiceStub(channel)
        calls = [stub.Propose() for _ in range(2)]
        for call in calls:
            await call.write(request(0, [1]))
            await call.read()
        third = stub.Propose()
        await third.write(request(0, [1]))
        error = describe(await failure(third))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")
        assert "its limit is 2" in error.message
        assert error.retry_after == 1.0
        drain = asyncio.ensure_future(StageServiceStub(channel).Drain(stage_pb2.DrainRequest()))
        await asyncio.sleep(0.05)
        late = stub.Propose()
        await late.write(request(0, [1]))
        assert describe(await failure(late)).reason == "DRAINING"
        await calls[0].write(request(1, [2]))
        assert list((await calls[0].read()).draft.token_ids) == [1, 2]
        for call in calls:
            await call.done_writing()
        assert (await drain).num_sessions == 0


async def test_the_tenant_is_that_of_the_first_request_and_of_bounded_length():
    async with hosted() as (engine, _, channel):
        call = DrafterServiceStub(channel).Propose()
        for base, tenant in enumerate(["alice", "", "bob"]):
            await call.write(request(base, [1], tenant=tenant))
            await call.read()
        assert engine.tenants == ["alice"]
        call.cancel()
        call = DrafterServiceStub(channel).Propose()
        await call.write(request(0, [1], tenant="\u00fc" * 65))
        error = describe(await failure(call))
        assert (error.code, error.violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "tenant")
        assert "130 bytes and may have 128" in error.violations[0].description
        assert engine.tenants == ["alice"]


async def test_malformed_hints_are_pruned_and_counted():
    async with hosted() as (_, _, channel):
        call = DrafterServiceStub(channel).Propose()
        hint = DraftTreeMessage(token_ids=[1, 2, 300], parents=[-1, 5, -1])
        budget = drafter_pb2.Budget(max_nodes=8, max_depth=4)
        await call.write(request(0, [1], hint=hint, budget=budget))
        assert (await call.read()).num_dropped_nodes == 2
        call.cancel()


async def test_a_budget_beyond_the_stages_limit_is_cut_to_it():
    async with hosted() as (engine, _, channel):
        budgets = []
        run = engine.run
        engine.run = lambda jobs: (budgets.extend(job.task.budget.max_nodes for job in jobs), run(jobs))
        call = DrafterServiceStub(channel).Propose()
        for most in (2**31 - 1, 3, -5):
            await call.write(request(0, [1], budget=drafter_pb2.Budget(max_nodes=most, max_depth=9)))
            await call.read()
        assert budgets == [6, 3, 0]
        call.cancel()


async def test_health_answers_while_the_engine_is_busy():
    async with hosted() as (engine, _, channel):
        engine.gate.clear()
        call = DrafterServiceStub(channel).Propose()
        await call.write(request(0, [1]))
        await asyncio.sleep(0.05)
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="stagespec.v1.DrafterService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        engine.gate.set()
        assert list((await call.read()).draft.token_ids) == [1]
        call.cancel()


async def test_a_stage_tells_about_itself():
    async with hosted() as (_, _, channel):
        stage = StageServiceStub(channel)
        info = (await stage.GetInfo(stage_pb2.GetInfoRequest())).info
        assert (info.name, info.protocol_version, info.max_sessions) == ("echo", 1, 4)
        pieces = [piece async for piece in stage.GetVocabulary(stage_pb2.GetVocabularyRequest())]
        assert [token for piece in pieces for token in piece.tokens] == [b"a", b"\xff", b"<s>"]
        assert [token_id for piece in pieces for token_id in piece.special_token_ids] == [2]
        await stage.StartProfile(stage_pb2.StartProfileRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.StartProfile(stage_pb2.StartProfileRequest())
        assert describe(caught.value).reason == "PROFILE_RUNNING"
        call = DrafterServiceStub(channel).Propose()
        await call.write(request(0, [1]))
        await call.read()
        call.cancel()
        trace = b"".join([piece.trace async for piece in stage.StopProfile(stage_pb2.StopProfileRequest())])
        assert {event["name"] for event in json.loads(trace)["traceEvents"]} >= {"queue", "sync"}
        assert (await failure(stage.StopProfile(stage_pb2.StopProfileRequest()))).code() == (
            grpc.StatusCode.FAILED_PRECONDITION
        )
        stats = await stage.GetStats(stage_pb2.GetStatsRequest())
        assert (stats.counters["requests_total"], stats.counters["sessions_total"]) == (1, 1)
        assert sum(stats.latencies["total"].counts) == 1
        assert "echoes_live" in stats.counters, "what the engine counts itself"


@pytest.mark.parametrize("kind", ["port", "socket"])
async def test_an_address_in_use_is_an_error_and_harms_nobody(kind, tmp_path):
    first = StageServer("first", EchoEngine(), max_sessions=1)
    address = await first.start("127.0.0.1:0" if kind == "port" else f"unix:{tmp_path}/stage")
    with pytest.raises(OSError, match=address):
        await StageServer("second", EchoEngine(), max_sessions=1).start(address)
    async with grpc.aio.insecure_channel(address) as channel:
        info = (await StageServiceStub(channel).GetInfo(stage_pb2.GetInfoRequest())).info
        assert info.name == "first"
    await first.stop(1.0)
