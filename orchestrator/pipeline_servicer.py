"""The PipelineService: from messages to the pipeline, and back."""

from typing import Any

import grpc

from orchestrator.admission import Admission
from orchestrator.pipeline import Pipeline
from orchestrator.stage import Stage, StageAddress
from orchestrator.violations import Violations
from stagespec.v1 import pipeline_pb2
from stagespec.v1.pipeline_pb2 import (
    AddDrafterRequest,
    AddDrafterResponse,
    CheckDrafterRequest,
    CheckDrafterResponse,
    CompatibilityCheck,
    DrafterAddress,
    GetPipelineRequest,
    GetPipelineResponse,
    RemoveDrafterRequest,
    RemoveDrafterResponse,
    StageState,
    SwapDrafterRequest,
    SwapDrafterResponse,
)
from stagespec.v1.pipeline_pb2_grpc import PipelineServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class PipelineServicer(PipelineServiceServicer):
    """Shows and changes a pipeline.

    Args:
        pipeline: The stages.
        admission: Who runs and waits.
    """

    def __init__(self, pipeline: Pipeline, admission: Admission) -> None:
        self._pipeline = pipeline
        self._admission = admission

    async def GetPipeline(self, request: GetPipelineRequest, context: Context) -> GetPipelineResponse:
        """Shows every stage, after asking each for a sign of life."""
        alive = await self._pipeline.reach()
        return GetPipelineResponse(
            drafters=[
                _to_proto(stage, alive[stage]) for stage in alive if stage is not self._pipeline.verifier
            ],
            verifier=_to_proto(self._pipeline.verifier, alive[self._pipeline.verifier]),
            num_running_requests=self._admission.num_running,
            num_waiting_requests=self._admission.num_waiting,
        )

    async def CheckDrafter(self, request: CheckDrafterRequest, context: Context) -> CheckDrafterResponse:
        """Runs every test against a drafter."""
        address = _read_address(request.drafter, "drafter", needs_name=False)
        inspection = await self._pipeline.check(address.address)
        return CheckDrafterResponse(
            compatible=inspection.compatible,
            checks=[
                CompatibilityCheck(name=check.name, passed=check.passed, detail=check.detail)
                for check in inspection.checks
            ],
            info=inspection.info,
        )

    async def AddDrafter(self, request: AddDrafterRequest, context: Context) -> AddDrafterResponse:
        """Puts a drafter into the pipeline."""
        address = _read_address(request.drafter, "drafter")
        await self._pipeline.add(address, request.index if request.HasField("index") else None)
        return AddDrafterResponse(drafters=self._names())

    async def SwapDrafter(self, request: SwapDrafterRequest, context: Context) -> SwapDrafterResponse:
        """Replaces a drafter."""
        await self._pipeline.swap(request.name, _read_address(request.successor, "successor"))
        return SwapDrafterResponse(drafters=self._names())

    async def RemoveDrafter(self, request: RemoveDrafterRequest, context: Context) -> RemoveDrafterResponse:
        """Takes a drafter out."""
        await self._pipeline.remove(request.name)
        return RemoveDrafterResponse(drafters=self._names())

    def _names(self) -> list[str]:
        return [stage.name for stage in self._pipeline.drafters]


def _read_address(message: DrafterAddress, field: str, *, needs_name: bool = True) -> StageAddress:
    found = Violations()
    if not message.address:
        found.add(f"{field}.address", "it is empty; give host:port or unix:path")
    if needs_name and not message.name:
        found.add(f"{field}.name", "it is empty")
    found.raise_any()
    return StageAddress(message.name, message.address)


def _to_proto(stage: Stage, alive: bool) -> pipeline_pb2.Stage:
    state, reason = StageState.STAGE_STATE_READY, stage.trouble
    if not alive:
        state, reason = StageState.STAGE_STATE_DOWN, reason or f"no answer at {stage.address}"
    elif reason:
        state = StageState.STAGE_STATE_IDLE
    return pipeline_pb2.Stage(
        name=stage.name,
        address=stage.address,
        state=state,
        idle_reason=reason,
        info=stage.info,
        totals=stage.counters.to_proto(),
    )
