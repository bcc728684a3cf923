"""A whole orchestrator over fakes, for tests that go through its public API."""

import asyncio
import functools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from orchestrator.server import OrchestratorServer
from orchestrator.settings import (
    AdmissionSettings,
    OrchestratorSettings,
    SpeculationSettings,
    TimeoutSettings,
)
from orchestrator.stage import StageAddress
from orchestrator.text import TextCodec
from stagespec.rpc import RpcError, describe
from stagespec.v1.generation_pb2 import Chunk, Completion, GenerateRequest
from stagespec.v1.generation_pb2_grpc import GenerationServiceStub
from stagespec.v1.pipeline_pb2_grpc import PipelineServiceStub
from tests.fakes import LETTERS, FakeStage, ScriptedDrafter, TableVerifier, write_model

PATIENT = TimeoutSettings(backoff_s=0.01, max_backoff_s=0.05)
"""For stages that answer: a busy machine must not make them late."""

HASTY = replace(PATIENT, propose_s=0.5, propose_per_token_s=0.0)
"""For drafters that hang."""


@dataclass
class Generated:
    """One whole generation."""

    chunks: list[Chunk] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def origins(self) -> list[str]:
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def logprobs(self) -> list[Any]:
        return [entry for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def end(self) -> Completion:
        assert self.completion is not None
        return self.completion


@dataclass
class Orchestrator:
    """A running orchestrator and its fakes."""

    server: OrchestratorServer
    address: str
    channel: grpc.aio.Channel
    verifier: TableVerifier
    drafters: list[ScriptedDrafter]

    @property
    def generation(self) -> Any:
        return GenerationServiceStub(self.channel)

    @property
    def pipeline(self) -> Any:
        return PipelineServiceStub(self.channel)

    async def generate(self, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Generated:
        """A generation to its end; the prompt is token ids unless `fields` has another."""
        return await read_all(self.generation.Generate(make_request(prompt, **fields)))

    async def refusal(self, request: GenerateRequest) -> RpcError:
        """The error of a request that is refused before anything is generated."""
        token_ids, error = await read_until_error(self.generation.Generate(request))
        assert token_ids == []
        return error


def make_request(prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> GenerateRequest:
    request = GenerateRequest(**fields)
    if request.WhichOneof("prompt") is None:
        request.token_ids.token_ids.extend(prompt)
    return request


async def read_all(call: Any) -> Generated:
    generated = Generated()
    async for response in call:
        assert generated.completion is None, "something came after the completion"
        if response.HasField("completion"):
            generated.completion = response.completion
        else:
            generated.chunks.append(response.chunk)
    return generated


async def read_until_error(call: Any) -> tuple[list[int], RpcError]:
    """The token ids that came before a call failed, and the error it failed with."""
    token_ids: list[int] = []
    try:
        async for response in call:
            token_ids += response.chunk.token_ids
    except grpc.aio.AioRpcError as error:
        return token_ids, describe(error)
    raise AssertionError("the call did not fail")


@asynccontextmanager
async def serve(
    codec: TextCodec,
    verifier: TableVerifier,
    drafters: Sequence[ScriptedDrafter] = (),
    *,
    speculation: SpeculationSettings | None = None,
    admission: AdmissionSettings | None = None,
    timeouts: TimeoutSettings = PATIENT,
) -> AsyncIterator[Orchestrator]:
    """Starts everything, and at the end finds every session freed and every draft well formed."""
    stages: list[FakeStage] = [verifier, *drafters]
    for stage in stages:
        await stage.start()
    settings = OrchestratorSettings(
        speculation or SpeculationSettings(), admission or AdmissionSettings(), timeouts
    )
    server = OrchestratorServer(
        settings,
        codec,
        StageAddress("target", verifier.address),
        [StageAddress(drafter.info.name, drafter.address) for drafter in drafters],
    )
    try:
        address = await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(address) as channel:
            yield Orchestrator(server, address, channel, verifier, list(drafters))
            await no_sessions(*stages)
            assert verifier.complaints == []
    finally:
        await server.stop(0)
        for stage in stages:
            await stage.stop()


async def no_sessions(*stages: FakeStage) -> None:
    """Waits until no stage holds a session, and fails if one keeps some."""
    until = time.monotonic() + 5
    while any(stage.live_sessions for stage in stages):
        assert time.monotonic() < until, [stage.live_sessions for stage in stages]
        await asyncio.sleep(0.005)


@functools.cache
def codec_of(tokens: tuple[bytes, ...] = tuple(LETTERS), special: tuple[str, ...] = ("<eos>",)) -> TextCodec:
    """A text side with just these tokens, ids in their order."""
    with tempfile.TemporaryDirectory() as folder:
        return TextCodec.load(write_model(Path(folder), tokens, special))
