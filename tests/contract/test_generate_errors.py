"""What the public API refuses, over real gRPC: the status, its details, and that nothing else is harmed."""

import asyncio
import math
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrator.server import OrchestratorServer
from orchestrator.settings import AdmissionSettings, OrchestratorSettings
from orchestrator.stage import StageAddress
from orchestrator.text import TextCodec
from stagespec.rpc import describe
from stagespec.v1.generation_pb2 import (
    DetokenizeRequest,
    GenerateRequest,
    GetModelInfoRequest,
    TokenizeRequest,
)
from stagespec.v1.pipeline_pb2 import GetPipelineRequest
from tests.fakes import ScriptedDrafter, TableVerifier, oracle, random_target, write_model
from tests.serving import PATIENT, codec_of, make_request, no_sessions, serve

CODEC = codec_of()
SIZE = len(CODEC.vocabulary.tokens)
TARGET = random_target(SIZE)


def verifier(**info: Any) -> TableVerifier:
    return TableVerifier(TARGET, CODEC.vocabulary, **info)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature", "nan is not from 0 to 100"),
        ({"stop": {"max_tokens": 0}}, "stop.max_tokens", "0 is below 1"),
        ({"stop": {"strings": ["x"] * 10_000}}, "stop.strings", "10000 entries are more than 16"),
        ({"token_ids": {"token_ids": [1] * 70}}, "token_ids", "70 tokens, the model's context takes 64"),
        ({"speculation": {"drafters": ["nope"]}}, "speculation.drafters[0]", "the pipeline has: none"),
        ({"request_id": "\u00fc"}, "request_id", "printable ASCII"),
        ({"tenant": "x" * 129}, "tenant", "at most 128 bytes"),
    ],
)
async def test_bad_values_are_invalid_arguments_and_reach_no_stage(fields, field, said):
    async with serve(CODEC, verifier(max_context_length=64)) as o:
        error = await o.refusal(make_request(**fields))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        [violation] = error.violations
        assert violation.field == field
        assert said in violation.description
        assert field in error.message
        assert o.verifier.num_requests == 0
        await o.generate(stop={"max_tokens": 3})


async def test_a_thousand_bad_values_still_fit_into_a_status():
    async with serve(CODEC, verifier()) as o:
        bias = dict.fromkeys(range(5000), math.inf)
        error = await o.refusal(make_request(sampling={"logit_bias": bias}))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(error.violations) == 11


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModelInfo"])
async def test_malformed_bytes_are_an_invalid_argument_without_internals(method):
    async with serve(CODEC, verifier()) as o:
        path = f"/stagespec.v1.GenerationService/{method}"
        # A stream's first read and a unary call's answer look the same to the server.
        call = o.channel.unary_stream(path)(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert describe(refused.value).reason == "MALFORMED_MESSAGE"
        assert "Error" not in (refused.value.details() or "")


async def test_an_oversized_message_is_refused_by_the_transport():
    async with serve(CODEC, verifier()) as o:
        error = await o.refusal(GenerateRequest(text="A" * 5_000_000))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_overload_is_refused_at_once_and_others_are_served():
    fake, gate = verifier(), asyncio.Event()

    async def wait(request: Any) -> None:
        await gate.wait()

    fake.before_answer = wait
    limits = AdmissionSettings(max_concurrent_requests=1, max_waiting_requests=1)
    async with serve(CODEC, fake, admission=limits) as o:
        first = asyncio.create_task(o.generate(stop={"max_tokens": 3}))
        while not fake.num_requests:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(o.generate(stop={"max_tokens": 3}, request_id="second"))
        while (await o.pipeline.GetPipeline(GetPipelineRequest())).num_waiting_requests == 0:
            await asyncio.sleep(0.001)
        third = await o.refusal(make_request(stop={"max_tokens": 3}))
        assert (third.code, third.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert third.retry_after is not None
        gate.set()
        assert len((await first).token_ids) == len((await second).token_ids) == 3
        assert (await second).end.timings.queue.ToNanoseconds() > 0


async def test_more_requests_than_the_verifier_has_sessions_wait_for_their_turn():
    fake, gate = verifier(max_sessions=2), asyncio.Event()

    async def wait(request: Any) -> None:
        await gate.wait()

    fake.before_answer = wait
    async with serve(CODEC, fake) as o:
        assert (await o.generation.GetModelInfo(GetModelInfoRequest())).max_concurrent_requests == 2
        generations = [asyncio.create_task(o.generate(stop={"max_tokens": 3})) for _ in range(3)]
        while not (shown := await o.pipeline.GetPipeline(GetPipelineRequest())).num_waiting_requests:
            await asyncio.sleep(0.001)
        assert shown.num_running_requests == 2
        gate.set()
        assert [len(each.token_ids) for each in await asyncio.gather(*generations)] == [3, 3, 3]


async def test_requests_wait_for_room_in_the_verifiers_cache_and_what_never_fits_is_refused():
    fake, gate = verifier(max_cache_tokens=100, max_context_length=400), asyncio.Event()

    async def wait(request: Any) -> None:
        await gate.wait()

    fake.before_answer = wait
    async with serve(CODEC, fake) as o:
        error = await o.refusal(make_request(stop={"max_tokens": 98}))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        [violation] = error.violations
        assert violation.field == "stop.max_tokens"
        assert "98 after a prompt of 3 tokens may take 101" in violation.description
        assert "room for 100" in violation.description
        # The first holds 3 + 40 + 24 nodes; 33 are left, the second needs 43 and the third 8.
        first = asyncio.create_task(o.generate(stop={"max_tokens": 40}))
        while not fake.num_requests:
            await asyncio.sleep(0.001)
        off = {"enabled": False}
        second = asyncio.create_task(o.generate(stop={"max_tokens": 40}, speculation=off))
        third = asyncio.create_task(o.generate(stop={"max_tokens": 5}, speculation=off))
        while (shown := await o.pipeline.GetPipeline(GetPipelineRequest())).num_waiting_requests < 2:
            await asyncio.sleep(0.001)
        assert shown.num_running_requests == 1, "first come, first served"
        gate.set()
        numbers = [len(each.token_ids) for each in await asyncio.gather(first, second, third)]
        assert numbers == [40, 40, 5]
        # With the whole cache for itself, drafts get smaller at its end.
        assert len((await o.generate(stop={"max_tokens": 97})).token_ids) == 97


async def test_draining_lets_running_requests_end_and_refuses_new_ones():
    fake, gate = verifier(), asyncio.Event()

    async def wait(request: Any) -> None:
        if request.step_id == 3:
            await gate.wait()

    fake.before_answer = wait
    async with serve(CODEC, fake) as o:
        health = health_pb2_grpc.HealthStub(o.channel)
        running = asyncio.create_task(o.generate(stop={"max_tokens": 6}))
        while fake.num_requests < 3:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(o.server.stop(30))
        while True:
            status = await health.Check(health_pb2.HealthCheckRequest())
            if status.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
        error = await o.refusal(make_request())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        gate.set()
        assert len((await running).token_ids) == 6
        await stopping


async def test_stopping_without_grace_ends_requests_and_frees_every_stage():
    fake = verifier()

    async def wait(request: Any) -> None:
        await asyncio.Event().wait()

    fake.before_answer = wait
    draft = ScriptedDrafter("draft", oracle(TARGET), CODEC.vocabulary)
    async with serve(CODEC, fake, [draft]) as o:
        refusal = asyncio.create_task(o.refusal(make_request()))
        while not fake.live_sessions:
            await asyncio.sleep(0.001)
        await o.server.stop(0)
        error = await refusal
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert error.retry_after is not None
        await no_sessions(fake, draft)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_taken_address_is_an_error_that_names_it(kind, tmp_path):
    async with serve(CODEC, verifier()) as o:
        listen = o.address

        def another() -> OrchestratorServer:
            return OrchestratorServer(
                OrchestratorSettings(timeouts=PATIENT), CODEC, StageAddress("target", o.verifier.address), []
            )

        first = another()
        if kind == "unix":
            listen = f"unix:{tmp_path}/socket"
            assert await first.start(listen) == listen
        second = another()
        with pytest.raises(OSError, match=f"cannot listen on {listen}"):
            await second.start(listen)
        await second.stop(0)
        async with grpc.aio.insecure_channel(listen) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING
        await first.stop(0)


async def test_health_and_reflection_name_the_services():
    async with serve(CODEC, verifier()) as o:
        health = health_pb2_grpc.HealthStub(o.channel)
        for service in ("", "stagespec.v1.GenerationService", "stagespec.v1.PipelineService"):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(o.channel)
        call = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {s.name async for r in call for s in r.list_services_response.service}
        assert {"stagespec.v1.GenerationService", "stagespec.v1.PipelineService"} <= names


async def test_model_information():
    fake = verifier(
        max_context_length=64, eos_token_ids=[16], model="toy", weight_format="float16", max_nodes=9
    )
    draft = ScriptedDrafter("draft", oracle(TARGET), CODEC.vocabulary)
    async with serve(CODEC, fake, [draft]) as o:
        info = MessageToDict(
            await o.generation.GetModelInfo(GetModelInfoRequest()), preserving_proto_field_name=True
        )
    assert info.pop("version")
    assert info == {
        "model": "toy",
        "tokenizer_hash": CODEC.tokenizer_hash,
        "vocabulary_size": SIZE,
        "max_context_length": 64,
        "default_max_tokens": 256,
        "eos_token_ids": [16],
        "drafters": ["draft"],
        "max_nodes": 9,
        "weight_format": "float16",
        "max_concurrent_requests": 8,
    }


async def test_tokenize_and_detokenize(tmp_path):
    template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    codec = TextCodec.load(write_model(tmp_path, [b"A", b"B"], ["<eos>"], chat_template=template))
    fake = TableVerifier(random_target(3), codec.vocabulary)
    chat = {"messages": [{"role": "user", "content": "AB"}]}
    async with serve(codec, fake) as o:
        api = o.generation
        assert list((await api.Tokenize(TokenizeRequest(text="BA"))).token_ids) == [1, 0]
        assert list((await api.Tokenize(TokenizeRequest(chat=chat))).token_ids) == [0, 1, 2]
        assert (await api.Detokenize(DetokenizeRequest(token_ids=[0, 2, 1]))).text == "A<eos>B"
        assert (await api.GetModelInfo(GetModelInfoRequest())).has_chat_template
        generated = await o.generate(chat=chat, stop={"max_tokens": 2}, return_prompt_token_ids=True)
        assert list(generated.end.prompt_token_ids) == [0, 1, 2]
        for call in (
            api.Tokenize(TokenizeRequest()),
            api.Tokenize(TokenizeRequest(chat={})),
            api.Detokenize(DetokenizeRequest(token_ids=[3])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
