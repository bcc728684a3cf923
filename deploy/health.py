"""Looks at a running server or stage from outside."""

from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagespec.rpc import channel_options
from stagespec.v1.pipeline_pb2 import GetPipelineRequest, GetPipelineResponse, StageState
from stagespec.v1.pipeline_pb2_grpc import PipelineServiceStub
from stagespec.v1.stage_pb2 import GetInfoRequest, StageInfo
from stagespec.v1.stage_pb2_grpc import StageServiceStub


@dataclass(frozen=True, slots=True)
class Health:
    """What was found.

    Attributes:
        status: What the health service says, such as "SERVING", or "UNREACHABLE".
        pipeline: The stages, if it is a server.
        stage: What it says about itself, if it is a stage.
    """

    status: str
    pipeline: GetPipelineResponse | None = None
    stage: StageInfo | None = None

    @property
    def healthy(self) -> bool:
        """Whether it serves, with a target that is ready. Drafters only cost speed."""
        if self.status != "SERVING":
            return False
        return self.pipeline is None or self.pipeline.verifier.state == StageState.STAGE_STATE_READY


async def look(address: str, timeout: float) -> Health:
    """Asks what listens at `address` how it is.

    Args:
        address: host:port or unix:path.
        timeout: Seconds to wait for each answer.
    """
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        get_pipeline: Any = PipelineServiceStub(channel).GetPipeline
        get_info: Any = StageServiceStub(channel).GetInfo
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return Health("UNREACHABLE")
            return Health(error.code().name)
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        try:
            return Health(status, pipeline=await get_pipeline(GetPipelineRequest(), timeout=timeout))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                return Health(error.code().name)
        try:
            return Health(status, stage=(await get_info(GetInfoRequest(), timeout=timeout)).info)
        except grpc.aio.AioRpcError:
            return Health(status)
