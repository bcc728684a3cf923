"""The public GenerationService: from messages to the decode loop, and back."""

import asyncio
import importlib.metadata
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, closing
from typing import Any

import grpc

from orchestrator.accounting import Account, chunks
from orchestrator.admission import Admission
from orchestrator.decode import Step, decode
from orchestrator.pipeline import Pipeline
from orchestrator.request import Generation, ServedModel, check_chat, check_name, encode_chat, settle
from orchestrator.session import Session
from orchestrator.settings import OrchestratorSettings
from orchestrator.stopping import Stopper
from orchestrator.text import TextCodec
from orchestrator.violations import Violations
from stagespec.v1.generation_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GetModelInfoRequest,
    GetModelInfoResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from stagespec.v1.generation_pb2_grpc import GenerationServiceServicer

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_ID_HEADER = "x-request-id"


class GenerationServicer(GenerationServiceServicer):
    """Serves generation on a pipeline.

    Args:
        settings: The orchestrator's settings.
        codec: The text side of the served model.
        pipeline: The stages.
        admission: Who may run.
    """

    def __init__(
        self, settings: OrchestratorSettings, codec: TextCodec, pipeline: Pipeline, admission: Admission
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._pipeline = pipeline
        self._admission = admission

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        """Streams a continuation. Refusals are raised as `RpcError`, see stagespec/guard.py."""
        arrived = time.monotonic()
        request_id = _request_id(request)
        await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
        # A long text takes long to tokenize, and the event loop has other requests to serve.
        generation = await asyncio.to_thread(settle, request, request_id, self._codec, self._served_model())
        async with self._admission.place(generation.num_cache_tokens) as place:
            account = Account(arrived)
            session = Session(self._pipeline, generation, self._settings.timeouts)
            with closing(session):
                async with aclosing(self._decode(generation, session)) as steps:
                    while (step := await place.hold(anext(steps, None))) is not None:
                        account.add(step)
                        session.account(step)
                        for chunk in chunks(step, session.clients, per_token=generation.chunk_per_token):
                            yield GenerateResponse(chunk=chunk)
            yield GenerateResponse(completion=account.completion(generation, session))
        _log.info("request %s: %s", request_id, account)

    async def GetModelInfo(self, request: GetModelInfoRequest, context: Context) -> GetModelInfoResponse:
        """Describes the served model."""
        model, info = self._served_model(), self._pipeline.verifier.info
        return GetModelInfoResponse(
            model=info.model,
            tokenizer_hash=self._codec.tokenizer_hash,
            vocabulary_size=model.vocabulary_size,
            max_context_length=model.max_context_length or 0,
            default_max_tokens=model.default_max_tokens,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=self._codec.chat_template is not None,
            drafters=model.drafter_names,
            max_nodes=model.max_nodes,
            version=_version(),
            weight_format=info.weight_format,
            max_concurrent_requests=self._admission.max_running,
        )

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        """Token ids of a prompt."""
        return TokenizeResponse(token_ids=await asyncio.to_thread(_tokenize, request, self._codec))

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        """Text of token ids."""
        found = Violations()
        found.check_token_ids("token_ids", request.token_ids, self._served_model().vocabulary_size)
        found.raise_any()
        return DetokenizeResponse(text=await asyncio.to_thread(self._codec.decode, request.token_ids))

    def _decode(self, generation: Generation, session: Session) -> AsyncGenerator[Step, None]:
        stopper = Stopper(generation.rules, self._codec.detokenizer())
        return decode(generation.prompt, session.drafters, session.verifier, generation.limits, stopper)

    def _served_model(self) -> ServedModel:
        info, speculation = self._pipeline.verifier.info, self._settings.speculation
        num_tokens = len(self._codec.vocabulary.tokens)
        return ServedModel(
            # A model may have more ids than its tokenizer has tokens; those have no text.
            vocabulary_size=min(info.vocabulary_size or num_tokens, num_tokens),
            max_context_length=info.max_context_length or None,
            max_cache_tokens=info.max_cache_tokens or None,
            eos_token_ids=tuple(info.eos_token_ids),
            drafter_names=tuple(stage.name for stage in self._pipeline.drafters),
            max_nodes=min(speculation.max_request_nodes, info.max_nodes or speculation.max_request_nodes),
            default_max_tokens=self._settings.admission.default_max_tokens,
            speculation=speculation,
        )


def _request_id(request: GenerateRequest) -> str:
    found = Violations()
    check_name("request_id", request.request_id, found)
    return request.request_id if request.request_id and not found else secrets.token_hex(8)


def _tokenize(request: TokenizeRequest, codec: TextCodec) -> list[int]:
    found = Violations()
    token_ids: list[int] = []
    kind = request.WhichOneof("prompt")
    if kind == "text":
        token_ids = codec.encode(request.text)
    elif kind == "chat":
        check_chat(request.chat, found)
        found.raise_any()
        token_ids = encode_chat(request.chat, codec, found)
    else:
        found.add("prompt", "it is not set; send text or chat")
    found.raise_any()
    return token_ids


def _version() -> str:
    try:
        return importlib.metadata.version("stagespec")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
