"""The target over real gRPC: observations in several messages, and requests that no verdict can answer."""

import asyncio

import grpc
import pytest

import services.verifier_servicer
from services.causal_lm.rows import BLOCK
from services.host import StageServer
from services.target.engine import TargetEngine
from services.target.settings import TargetSettings
from stagespec.rpc import describe
from stagespec.v1.context_pb2 import ContextDelta
from stagespec.v1.observation_pb2 import ELEMENT_TYPE_FLOAT32, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams
from stagespec.v1.stage_pb2 import GetInfoRequest, GetStatsRequest
from stagespec.v1.stage_pb2_grpc import StageServiceStub
from stagespec.v1.verifier_pb2 import VerifyRequest
from stagespec.v1.verifier_pb2_grpc import VerifierServiceStub
from tests.models import CONTEXT_LENGTH, save, tiny_model

PROMPT = [(7 * i) % 100 for i in range(60)]
NAN = float("nan")


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> TargetEngine:
    folder = save(tiny_model("llama"), tmp_path_factory.mktemp("target"))
    return TargetEngine(TargetSettings(folder, prefill_chunk=8))


@pytest.fixture
async def stub(engine):
    server = StageServer("target", engine, max_sessions=2)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        yield VerifierServiceStub(channel)
    await server.stop(1.0)


def request(token_ids=PROMPT, **fields) -> VerifyRequest:
    return VerifyRequest(step_id=4, context=ContextDelta(session_id="s", token_ids=token_ids), **fields)


async def test_long_observations_come_in_several_messages_before_the_verdict(stub, monkeypatch):
    monkeypatch.setattr(services.verifier_servicer, "OBSERVATION_BYTES", 5000)
    call = stub.Verify()
    await call.write(request(observations=ObservationRequest(hidden_states=ELEMENT_TYPE_FLOAT32)))
    answers = [await call.read()]
    while not answers[-1].HasField("verdict"):
        answers.append(await call.read())
    assert len(answers) > 3
    assert all(answer.step_id == 4 and answer.ByteSize() < 6000 for answer in answers)
    seen = [observation for answer in answers for observation in answer.observations]
    assert [o.first_position for o in seen] == list(range(0, 60, 8))
    assert sum(o.num_positions for o in seen) == len(PROMPT)
    call.cancel()


async def test_a_full_cache_ends_one_stream_with_a_reason_and_the_pool_shows_in_the_books(engine):
    block = BLOCK * engine.info.cache_bytes_per_token
    settings = TargetSettings(
        engine.info.model,
        max_sessions=2,
        max_nodes=16,
        max_cache_bytes=3 * block,
        prefix_pool_bytes=2 * block,
    )
    server = StageServer("target", TargetEngine(settings), max_sessions=2)
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
        verify, stage = VerifierServiceStub(channel).Verify, StageServiceStub(channel)
        assert (await stage.GetInfo(GetInfoRequest())).info.max_cache_tokens == 3 * BLOCK - 2 * (BLOCK - 1)
        first, second = verify(), verify()
        await first.write(request([1] * 200))
        assert (await first.read()).HasField("verdict")
        await second.write(request([2] * 200))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        error = describe(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CACHE_FULL")
        assert error.retry_after is not None
        await first.write(VerifyRequest(step_id=5, context=ContextDelta(session_id="s", base_length=200)))
        assert (await first.read()).HasField("verdict")
        await first.done_writing()
        assert await first.read() == grpc.aio.EOF
        while not (counters := (await stage.GetStats(GetStatsRequest())).counters)[
            "prefix_pool_entries_live"
        ]:
            await asyncio.sleep(0.005)
        assert counters["prefix_pool_bytes_live"] == 2 * block
        assert (counters["cache_bytes_live"], counters["cache_refusals_total"]) == (0, 1)
        for tenant, num_rows in (("", 1), ("other", 200)):
            call = verify()
            await call.write(request([1] * 200, tenant=tenant))
            assert (await call.read()).verdict.num_rows == num_rows
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF
        counters = (await stage.GetStats(GetStatsRequest())).counters
        assert (counters["prefix_pool_hits_total"], counters["prefix_pool_rows_total"]) == (1, 200)
    await server.stop(1.0)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request([]), "context"),
        (request([1] * CONTEXT_LENGTH), "context"),
        (request(num_logprobs=21), "num_logprobs"),
        (request(observations=ObservationRequest(num_candidates=-1)), "observations.num_candidates"),
        (request(observations=ObservationRequest(num_candidates=65)), "observations.num_candidates"),
        (request(observations=ObservationRequest(hidden_states=99)), "observations.hidden_states"),
        (request(sampling=SamplingParams(temperature=-1)), "sampling.temperature"),
        (request(sampling=SamplingParams(temperature=NAN)), "sampling.temperature"),
        (request(sampling=SamplingParams(top_k=0)), "sampling.top_k"),
        (request(sampling=SamplingParams(top_p=0)), "sampling.top_p"),
        (request(sampling=SamplingParams(min_p=2)), "sampling.min_p"),
        (request(sampling=SamplingParams(repetition_penalty=0)), "sampling.repetition_penalty"),
        (request(sampling=SamplingParams(frequency_penalty=NAN)), "sampling.frequency_penalty"),
        (request(sampling=SamplingParams(logit_bias={1: NAN})), "sampling.logit_bias[1]"),
    ],
)
async def test_what_no_verdict_can_answer_is_refused_by_name(stub, bad, field):
    call = stub.Verify()
    await call.write(bad)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = describe(caught.value)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
