"""A small typed client of a running server, for the command line, the benchmarks and the tests.

It knows the public services only; how a server came to be is elsewhere.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import grpc
from google.protobuf.message import Message

from deploy.errors import SetupError
from stagespec.rpc import channel_options, describe
from stagespec.v1.generation_pb2 import (
    Chunk,
    Completion,
    GenerateRequest,
    GenerateResponse,
    SpeculationOptions,
)
from stagespec.v1.generation_pb2_grpc import GenerationServiceStub
from stagespec.v1.pipeline_pb2 import GetPipelineRequest, GetPipelineResponse
from stagespec.v1.pipeline_pb2_grpc import PipelineServiceStub

Mode = Literal["off", "ngram", "draft", "staged", "chain"]
MODES: tuple[Mode, ...] = get_args(Mode)

CHAIN_LENGTH = 5
"""Tokens in a draft of mode "chain", unless it is told otherwise."""

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole generation.

    Attributes:
        token_ids: Its tokens.
        text: Its text.
        completion: What the server says about it.
    """

    token_ids: tuple[int, ...]
    text: str
    completion: Completion


class Client:
    """A connection to one server, used as an async context manager.

    Args:
        address: Where it listens, as host:port or unix:path.

    Attributes:
        generation: Stub of GenerationService, for `call`.
        pipeline: Stub of PipelineService, for `call`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.generation = GenerationServiceStub(self._channel)
        self.pipeline = PipelineServiceStub(self._channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def call(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]",
        request: RequestT,
        timeout: float = 30.0,
    ) -> ResponseT:
        """Calls a unary method of one of the stubs.

        Raises:
            RpcError: The server refused.
            SetupError: No server answers.
        """
        try:
            response = await method(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        return response

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Completion]:
        """Streams a generation: chunks, then one completion.

        Raises:
            RpcError: The server refused, or the generation failed.
            SetupError: No server answers.
        """
        method: Any = self.generation.Generate
        call = method(request)
        try:
            response: GenerateResponse
            async for response in call:
                yield response.completion if response.HasField("completion") else response.chunk
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        finally:
            # Leaving the loop early does not end the call by itself.
            call.cancel()

    async def complete(self, request: GenerateRequest) -> Generated:
        """Runs a generation to its end.

        Raises:
            RpcError: The server refused, or the generation failed.
            SetupError: No server answers.
        """
        token_ids: list[int] = []
        text: list[str] = []
        completion: Completion | None = None
        async for event in self.generate(request):
            if isinstance(event, Completion):
                completion = event
            else:
                token_ids += event.token_ids
                text.append(event.text)
        if completion is None:
            raise SetupError(f"the server at {self._address} ended a generation without a completion")
        return Generated(tuple(token_ids), "".join(text), completion)

    async def get_pipeline(self) -> GetPipelineResponse:
        """The stages of the server.

        Raises:
            RpcError: The server refused.
            SetupError: No server answers.
        """
        return await self.call(self.pipeline.GetPipeline, GetPipelineRequest())

    def _translate(self, error: grpc.aio.AioRpcError) -> Exception:
        described = describe(error)
        # Without details the status comes from gRPC itself, whose text is about sockets.
        if described.code is grpc.StatusCode.UNAVAILABLE and described.reason == described.code.name:
            return SetupError(f"no server answers at {self._address}; `stagespec serve` starts one")
        return described


def speculation(
    mode: Mode, pipeline: GetPipelineResponse, chain_length: int = CHAIN_LENGTH
) -> SpeculationOptions:
    """The options that a preset stands for in a pipeline.

    "ngram" and "draft" use the drafters of that kind, "staged" all of them. "chain" is speculation as it is
    usually done with two models (arXiv 2211.17192): a draft model alone guesses `chain_length` tokens one
    after the other, each with a pass of its own.

    Args:
        mode: The preset.
        pipeline: The stages that there are.
        chain_length: Tokens in a draft of mode "chain".

    Raises:
        SetupError: The pipeline has no such drafter.
    """
    if mode == "off":
        return SpeculationOptions(enabled=False)
    if mode == "staged":
        return SpeculationOptions(enabled=True)
    if mode == "chain":
        return SpeculationOptions(
            enabled=True,
            drafters=[_draft_model(pipeline)],
            max_nodes=chain_length,
            max_depth=chain_length,
            max_rounds=chain_length,
            max_children=1,
            fixed_size=True,
        )
    names = [stage.name for stage in pipeline.drafters if mode in (stage.info.implementation, stage.name)]
    if not names:
        raise SetupError(f"mode {mode} needs a drafter of that kind; the pipeline has {_drafters(pipeline)}")
    return SpeculationOptions(enabled=True, drafters=names)


def _draft_model(pipeline: GetPipelineResponse) -> str:
    """The drafter named "draft", or else the only one that has a model."""
    if any(stage.name == "draft" for stage in pipeline.drafters):
        return "draft"
    names = [stage.name for stage in pipeline.drafters if stage.info.num_parameters > 0]
    if len(names) != 1:
        needed = 'one drafter with a model, or one named "draft"'
        raise SetupError(f"mode chain needs {needed}; the pipeline has {_drafters(pipeline)}")
    return names[0]


def _drafters(pipeline: GetPipelineResponse) -> str:
    there = ", ".join(f"{stage.name} ({stage.info.implementation})" for stage in pipeline.drafters)
    return there or "none"
