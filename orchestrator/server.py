"""The orchestrator as a server: it comes up when every stage fits, and goes down without cutting answers off.

What is served is in the servicers; who starts and restarts the stages is not known here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from orchestrator.admission import Admission
from orchestrator.generation_servicer import GenerationServicer
from orchestrator.pipeline import Pipeline
from orchestrator.pipeline_servicer import PipelineServicer
from orchestrator.settings import OrchestratorSettings
from orchestrator.stage import StageAddress
from orchestrator.text import TextCodec
from stagespec.guard import GuardInterceptor
from stagespec.listen import bind
from stagespec.rpc import PUBLIC_MESSAGE_BYTES, server_options
from stagespec.v1 import generation_pb2, pipeline_pb2
from stagespec.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from stagespec.v1.pipeline_pb2_grpc import add_PipelineServiceServicer_to_server

_log = logging.getLogger(__name__)

_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    pipeline_pb2.DESCRIPTOR.services_by_name["PipelineService"].full_name,
)
_FAREWELL_S = 0.5
_CLEANUP_S = 5.0


class OrchestratorServer:
    """Serves GenerationService and PipelineService.

    Args:
        settings: Its settings.
        codec: The text side of the served model.
        verifier: Where the verifier is.
        drafters: Where the drafters are, in order.

    Attributes:
        pipeline: The stages in use; whoever restarts one elsewhere calls `pipeline.relocate`.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        codec: TextCodec,
        verifier: StageAddress,
        drafters: Sequence[StageAddress],
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._addresses = (verifier, tuple(drafters))
        self.pipeline = Pipeline(codec.vocabulary, codec.tokenizer_hash, settings.timeouts)
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._admission = Admission(
            settings.admission.max_concurrent_requests,
            settings.admission.max_waiting_requests,
            settings.timeouts.admission_s,
            # Read each time, since a verifier that was restarted may have another.
            lambda: self.pipeline.verifier.info.max_cache_tokens,
        )

    async def start(self, listen: str) -> str:
        """Binds the address, reaches and tests every stage, then serves.

        Args:
            listen: host:port, with port 0 for any free one, or unix:path.

        Returns:
            The address that clients can use.

        Raises:
            OSError: The address cannot be used.
            RpcError: A stage does not answer or does not fit; the message names it.
        """
        # Until the pipeline stands, nothing may be called ready.
        for service in ("", *_SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        server = grpc.aio.server(
            interceptors=[GuardInterceptor()], options=server_options(PUBLIC_MESSAGE_BYTES)
        )
        generation = GenerationServicer(self._settings, self._codec, self.pipeline, self._admission)
        add_GenerationServiceServicer_to_server(generation, server)
        add_PipelineServiceServicer_to_server(PipelineServicer(self.pipeline, self._admission), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflected = (*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*reflected, reflection.SERVICE_NAME), server)

        try:
            address, refusal = bind(server, listen), ""
        except OSError as error:
            address, refusal = "", str(error)
        if refusal:
            # Raised out here, since gRPC cannot clean up a server that a traceback keeps alive.
            await server.stop(None)
            del server
            raise OSError(refusal)
        self._server = server
        try:
            await self.pipeline.connect(*self._addresses)
            # Better to wait here, in order, than to be turned away there.
            most = self.pipeline.verifier.info.max_sessions
            if most > 0:
                self._admission.max_running = min(self._admission.max_running, most)
            await server.start()
        except BaseException:
            await self.stop(0)
            del server
            raise
        for service in ("", *_SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        _log.info("serving on %s", address)
        return address

    async def stop(self, grace: float) -> None:
        """Refuses new requests, lets running ones end for `grace` seconds, then ends them."""
        _log.info("draining: running requests have %.0f s to end", grace)
        await self._health.enter_graceful_shutdown()
        self._admission.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), grace)
        self._admission.withdraw()
        if self._server is not None:
            # Time for those answers to leave; what is then left gets a status of gRPC's own.
            await self._server.stop(_FAREWELL_S)
            self._server = None
        # gRPC doesn't wait for the handlers it cancelled, and they free the sessions.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._admission.wait_idle(), _CLEANUP_S)
        await self.pipeline.close()
