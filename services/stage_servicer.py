"""StageService over any engine: what the stage is, its vocabulary, its books, its trace, its drain."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.sessions import Sessions
from stagespec.rpc import RpcError, seconds
from stagespec.v1 import stage_pb2
from stagespec.v1.stage_pb2_grpc import StageServiceServicer
from stagespec.vocabulary import Vocabulary

VOCABULARY_CHUNK = 8192
TRACE_CHUNK_BYTES = 1024 * 1024
DEFAULT_GRACE = 30.0


class StageServicer(StageServiceServicer):
    """Answers questions about one stage."""

    def __init__(
        self, info: stage_pb2.StageInfo, vocabulary: Vocabulary | None, sessions: Sessions[Any, Any, Any]
    ) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._sessions = sessions

    async def GetInfo(self, request: stage_pb2.GetInfoRequest, context: Any) -> stage_pb2.GetInfoResponse:
        return stage_pb2.GetInfoResponse(info=self._info)

    async def GetVocabulary(
        self, request: stage_pb2.GetVocabularyRequest, context: Any
    ) -> AsyncIterator[stage_pb2.GetVocabularyResponse]:
        if self._vocabulary is None:
            return
        tokens, special_ids = self._vocabulary.tokens, sorted(self._vocabulary.special_ids)
        for first in range(0, len(tokens), VOCABULARY_CHUNK):
            piece = tokens[first : first + VOCABULARY_CHUNK]
            special = [token_id for token_id in special_ids if first <= token_id < first + len(piece)]
            yield stage_pb2.GetVocabularyResponse(
                first_token_id=first, tokens=piece, special_token_ids=special
            )

    async def GetStats(self, request: stage_pb2.GetStatsRequest, context: Any) -> stage_pb2.GetStatsResponse:
        response = self._sessions.stats.to_proto()
        response.counters.update(self._sessions.engine.counters)
        return response

    async def StartProfile(
        self, request: stage_pb2.StartProfileRequest, context: Any
    ) -> stage_pb2.StartProfileResponse:
        if not self._sessions.stats.start_trace():
            message = "a trace is being recorded already; stop it first"
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "PROFILE_RUNNING", message)
        return stage_pb2.StartProfileResponse()

    async def StopProfile(
        self, request: stage_pb2.StopProfileRequest, context: Any
    ) -> AsyncIterator[stage_pb2.StopProfileResponse]:
        trace = self._sessions.stats.stop_trace()
        if trace is None:
            message = "no trace is being recorded; start one first"
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, "PROFILE_NOT_RUNNING", message)
        for begin in range(0, len(trace), TRACE_CHUNK_BYTES):
            yield stage_pb2.StopProfileResponse(trace=trace[begin : begin + TRACE_CHUNK_BYTES])

    async def Drain(self, request: stage_pb2.DrainRequest, context: Any) -> stage_pb2.DrainResponse:
        grace = seconds(request.grace) if request.HasField("grace") else DEFAULT_GRACE
        return stage_pb2.DrainResponse(num_sessions=await self._sessions.drain(grace))
