"""Hosts one stage: a grpc.aio server around an engine, whatever the engine computes.

It does not know how the process came to be: a command, a plain child process or a Ray actor.
"""

import os
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.drafter_servicer import DrafterServicer
from services.engine import Engine
from services.sessions import Sessions
from services.stage_servicer import StageServicer
from services.stats import Stats
from services.verifier_servicer import VerifierServicer
from stagespec.guard import GuardInterceptor
from stagespec.listen import bind
from stagespec.rpc import PROTOCOL_VERSION, STAGE_MESSAGE_BYTES, server_options
from stagespec.v1 import drafter_pb2, stage_pb2, verifier_pb2
from stagespec.v1.drafter_pb2_grpc import add_DrafterServiceServicer_to_server
from stagespec.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from stagespec.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server


class StageServer:
    """One stage on one address."""

    def __init__(self, name: str, engine: Engine[Any, Any, Any], *, max_sessions: int) -> None:
        """Makes a server that doesn't listen yet.

        Args:
            name: The stage's name in the pipeline.
            engine: What it computes.
            max_sessions: Most sessions at once; 0 for no limit.
        """
        self._name = name
        self._engine = engine
        self._max_sessions = max_sessions
        self._sessions: Sessions[Any, Any, Any] | None = None
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()

    async def start(self, address: str) -> str:
        """Begins to serve.

        Args:
            address: "host:port" with port 0 for any free one, or "unix:path".

        Returns:
            The address it listens on.

        Raises:
            OSError: The address cannot be bound.
        """
        self._sessions = Sessions(self._engine, Stats(), self._max_sessions)
        server = grpc.aio.server(
            interceptors=[GuardInterceptor()], options=server_options(STAGE_MESSAGE_BYTES)
        )
        add_StageServiceServicer_to_server(
            StageServicer(self._info(), self._engine.vocabulary, self._sessions), server
        )
        if self._engine.info.kind == stage_pb2.STAGE_KIND_VERIFIER:
            add_VerifierServiceServicer_to_server(VerifierServicer(self._sessions), server)
            service = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
        else:
            add_DrafterServiceServicer_to_server(DrafterServicer(self._sessions), server)
            service = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name
        stage_service = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            [service, stage_service, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        try:
            bound, refusal = bind(server, address), ""
        except OSError as error:
            bound, refusal = "", str(error)
        if refusal:
            # Raised out here, since grpc cannot clean up a server that a traceback keeps alive.
            self._sessions.stop()
            await server.stop(0.0)
            del server
            raise OSError(f"stage {self._name} {refusal}")
        await server.start()
        self._server = server
        for name in ("", service, stage_service):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def stop(self, grace: float) -> None:
        """Takes no new sessions, waits up to `grace` seconds for live ones, then ends."""
        if self._server is None or self._sessions is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._sessions.drain(grace)
        await self._server.stop(0.0)
        self._sessions.stop()
        self._server = None

    def _info(self) -> stage_pb2.StageInfo:
        info = stage_pb2.StageInfo()
        info.CopyFrom(self._engine.info)
        info.name = self._name
        info.protocol_version = PROTOCOL_VERSION
        info.max_sessions = self._max_sessions
        info.process_id = os.getpid()
        now = Timestamp()
        now.GetCurrentTime()
        info.start_time.CopyFrom(now)
        return info
