"""The stages in use: one verifier and an ordered line of drafters, changed while requests run.

Requests read the line at each step, so a change reaches them at their next one. It never changes their
tokens. How a stage is called is not known here.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from orchestrator.backoff import Backoff
from orchestrator.compatibility import Inspection, Requirements, inspect
from orchestrator.settings import TimeoutSettings
from orchestrator.stage import Stage, StageAddress, connect
from stagespec.rpc import FieldViolation, RpcError, invalid_argument
from stagespec.v1.stage_pb2 import StageKind
from stagespec.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

TARGET_ORIGIN = "target"
"""Origin of the tokens that the target itself drew; no drafter may have this name."""

_RETIRE_S = 30.0


class Pipeline:
    """The stages that requests use.

    Args:
        vocabulary: The vocabulary of prompts and answers, which every stage must share.
        tokenizer_hash: Hash of that vocabulary.
        timeouts: How long to wait for stages.
    """

    def __init__(self, vocabulary: Vocabulary, tokenizer_hash: str, timeouts: TimeoutSettings) -> None:
        self._vocabulary = vocabulary
        self._tokenizer_hash = tokenizer_hash
        self._timeouts = timeouts
        self._drafters: tuple[Stage, ...] = ()
        self._verifier: Stage | None = None
        self._change = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def drafters(self) -> tuple[Stage, ...]:
        """The drafters in order. The tuple is replaced as a whole, never changed."""
        return self._drafters

    @property
    def verifier(self) -> Stage:
        """The verifier."""
        assert self._verifier is not None, "the pipeline is not connected"
        return self._verifier

    async def connect(self, verifier: StageAddress, drafters: Sequence[StageAddress]) -> None:
        """Reaches every stage and tests it.

        Raises:
            RpcError: A stage does not answer, does not fit, or has another one's name. The message names it.
        """
        self._verifier = await self._admit(verifier, StageKind.STAGE_KIND_VERIFIER, at_start=True)
        for address in drafters:
            self._refuse_name(address.name, "drafters")
            drafter = await self._admit(address, StageKind.STAGE_KIND_DRAFTER, at_start=True)
            self._drafters = (*self._drafters, drafter)

    async def close(self) -> None:
        """Closes every connection."""
        for task in self._retiring:
            task.cancel()
        stages = [*self._drafters, *([self._verifier] if self._verifier is not None else [])]
        for stage in stages:
            await stage.channel.close()

    async def check(self, address: str) -> Inspection:
        """Tests a drafter and changes nothing."""
        channel = connect(address)
        try:
            return await self._inspect(channel, StageKind.STAGE_KIND_DRAFTER)
        finally:
            await channel.close()

    async def add(self, drafter: StageAddress, index: int | None = None) -> None:
        """Puts a drafter into the line, at the end if no index is given.

        Raises:
            RpcError: ALREADY_EXISTS, INVALID_ARGUMENT, or FAILED_PRECONDITION if it does not fit.
        """
        async with self._change:
            self._refuse_name(drafter.name, "drafter.name")
            position = len(self._drafters) if index is None else index
            if not 0 <= position <= len(self._drafters):
                limit = f"{index} is outside 0 to {len(self._drafters)}"
                raise invalid_argument([FieldViolation("index", limit)])
            stage = await self._admit(drafter, StageKind.STAGE_KIND_DRAFTER)
            self._drafters = (*self._drafters[:position], stage, *self._drafters[position:])
            _log.info("drafter %s at %s joined the pipeline", drafter.name, drafter.address)

    async def swap(self, name: str, successor: StageAddress) -> None:
        """Replaces a drafter. If it fails, the old one stays.

        Raises:
            RpcError: NOT_FOUND, ALREADY_EXISTS, or FAILED_PRECONDITION if the successor does not fit.
        """
        async with self._change:
            old = self._find_drafter(name)
            if successor.name != name:
                self._refuse_name(successor.name, "successor.name")
            stage = await self._admit(successor, StageKind.STAGE_KIND_DRAFTER)
            self._drafters = tuple(stage if each is old else each for each in self._drafters)
            self._retire(old)
            _log.info("drafter %s was replaced by %s at %s", name, successor.name, successor.address)

    async def remove(self, name: str) -> None:
        """Takes a drafter out of the line.

        Raises:
            RpcError: NOT_FOUND.
        """
        async with self._change:
            old = self._find_drafter(name)
            self._drafters = tuple(each for each in self._drafters if each is not old)
            self._retire(old)
            _log.info("drafter %s left the pipeline", name)

    async def relocate(self, name: str, old_address: str, address: str) -> bool:
        """Follows a stage that was restarted elsewhere. Running requests go on with it there.

        Args:
            name: The stage's name.
            old_address: Where it was. A stage of that name elsewhere is another one, and stays.
            address: Where it is now.

        Returns:
            Whether the stage is in use.

        Raises:
            RpcError: FAILED_PRECONDITION if what answers there does not fit.
        """
        async with self._change:
            for stage in (self.verifier, *self._drafters):
                if (stage.name, stage.address) == (name, old_address):
                    break
            else:
                return False
            is_verifier = stage is self._verifier
            kind = StageKind.STAGE_KIND_VERIFIER if is_verifier else StageKind.STAGE_KIND_DRAFTER
            moved = await self._admit(StageAddress(name, address), kind, at_start=True)
            await stage.move(address, moved.channel, moved.info)
            return True

    async def reach(self) -> dict[Stage, bool]:
        """Asks every stage for a sign of life."""
        stages = (*self._drafters, self.verifier)
        found = await asyncio.gather(*(self._inspect(stage.channel, stage.info.kind) for stage in stages))
        return {stage: result.info is not None for stage, result in zip(stages, found, strict=True)}

    async def _admit(
        self, stage: StageAddress, kind: StageKind.ValueType, *, at_start: bool = False
    ) -> Stage:
        channel = connect(stage.address)
        inspection = await self._inspect(channel, kind, at_start=at_start)
        if inspection.info is None or not inspection.compatible:
            await channel.close()
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "INCOMPATIBLE_STAGE",
                f"stage {stage.name!r} at {stage.address} does not fit: {inspection.objection}",
            )
        backoff = Backoff(self._timeouts.backoff_s, self._timeouts.max_backoff_s)
        return Stage(stage.name, stage.address, channel, inspection.info, backoff)

    async def _inspect(
        self, channel: grpc.aio.Channel, kind: StageKind.ValueType, *, at_start: bool = False
    ) -> Inspection:
        known = 0 if self._verifier is None else self._verifier.info.max_context_length
        required = Requirements(kind, self._vocabulary, self._tokenizer_hash, known)
        timeout = self._timeouts.connect_s if at_start else self._timeouts.check_s
        return await inspect(channel, required, timeout, wait_for_ready=at_start)

    def _refuse_name(self, name: str, field: str) -> None:
        if not 1 <= len(name) <= 64 or not name.isprintable():
            raise invalid_argument([FieldViolation(field, "a stage's name has 1 to 64 printable characters")])
        taken = {TARGET_ORIGIN, self.verifier.name, *(stage.name for stage in self._drafters)}
        if name in taken:
            raise RpcError(
                grpc.StatusCode.ALREADY_EXISTS, "STAGE_EXISTS", f"there is a stage named {name!r} already"
            )

    def _find_drafter(self, name: str) -> Stage:
        for stage in self._drafters:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self._drafters) or "none"
        raise RpcError(
            grpc.StatusCode.NOT_FOUND,
            "UNKNOWN_DRAFTER",
            f"no drafter is named {name!r}; the pipeline has: {known}",
        )

    def _retire(self, stage: Stage) -> None:
        # Running requests leave it at their next step.
        task = asyncio.create_task(stage.channel.close(_RETIRE_S))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
