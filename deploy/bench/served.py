"""Own modes, measured as users get them: through the public API of a running server."""

import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from deploy.bench.roofline import target_work
from deploy.bench.settings import OWN_SIZES, PLAIN, SAMPLINGS, Settings, Variant
from deploy.bench.ways import Description, Sample, Way
from deploy.client import Client, Mode, speculation
from deploy.config import Config
from deploy.errors import SetupError
from deploy.prompts import Prompt
from deploy.serve import running
from deploy.stages import NgramStage
from stagespec.v1.generation_pb2 import (
    Completion,
    GenerateRequest,
    GetModelInfoRequest,
    GetModelInfoResponse,
    SamplingOptions,
    SpeculationOptions,
    StopOptions,
    TokenIds,
    TokenizeRequest,
)
from stagespec.v1.pipeline_pb2 import GetPipelineResponse
from stagespec.v1.stage_pb2 import StageInfo

_LOCAL = ("127.0.0.1", "localhost", "[::1]", "unix")


def with_variant(config: Config, variant: Variant) -> Config:
    """The configuration with the models of all its stages told to compute that way.

    Raises:
        SetupError: A model setting does not take the value.
    """
    stages: dict[str, Any] = {}
    for name, stage in config.stages.items():
        stages[name] = stage
        if not isinstance(stage, NgramStage) and variant.changes:
            changes: dict[str, Any] = dict(variant.changes)
            settings: Any = stage.settings
            try:
                stages[name] = replace(stage, settings=replace(settings, **changes))
            except ValueError as error:
                raise SetupError(f"stage {name}: {error}") from error
    return replace(config, stages=stages)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        label: Of the variant that it serves.
        client: A connection to it.
        pipeline: Its stages.
        model: What it says of the model that it serves.
        is_local: Whether its processes are on this machine.
        holds_orchestrator: Whether its orchestrator runs in this process.
    """

    label: str
    client: Client
    pipeline: GetPipelineResponse
    model: GetModelInfoResponse
    is_local: bool
    holds_orchestrator: bool

    @property
    def target(self) -> StageInfo:
        """What the target says of itself."""
        return self.pipeline.verifier.info

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens."""
        request, whole = TokenizeRequest(), prompt.request()
        if whole.WhichOneof("prompt") == "chat":
            request.chat.CopyFrom(whole.chat)
        else:
            request.text = whole.text
        response = await self.client.call(self.client.generation.Tokenize, request)
        return list(response.token_ids)


@asynccontextmanager
async def connect(address: str, label: str, *, own: bool) -> AsyncIterator[Server]:
    """Connects to a running server.

    Args:
        address: Where it listens.
        label: Of the variant that it serves.
        own: Whether this process runs it.

    Raises:
        SetupError: No server answers.
    """
    async with Client(address) as client:
        pipeline = await client.get_pipeline()
        model = await client.call(client.generation.GetModelInfo, GetModelInfoRequest())
        is_local = own or address.rpartition(":")[0] in _LOCAL or address.startswith("unix:")
        yield Server(label, client, pipeline, model, is_local, own)


@asynccontextmanager
async def serve(config: Config, variant: Variant, note: Callable[[str], None]) -> AsyncIterator[Server]:
    """Runs a server for as long as the context lasts.

    Raises:
        SetupError: It does not start.
    """
    async with (
        running(with_variant(config, variant), note) as address,
        connect(address, variant.label, own=True) as server,
    ):
        yield server


@dataclass(frozen=True, slots=True)
class Stream:
    """One generation as it came.

    Attributes:
        begin: When it was asked for, on the clock of `time.perf_counter`.
        arrivals: When tokens came, and how many.
        end: When it was over.
        token_ids: The tokens.
        origins: Who proposed each of them.
        completion: What the server says of it.
    """

    begin: float
    arrivals: tuple[tuple[float, int], ...]
    end: float
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    completion: Completion

    @property
    def counts(self) -> dict[str, int]:
        """Steps, drafted and accepted nodes and draft passes."""
        stats = self.completion.speculation
        return {
            "num_steps": stats.num_steps,
            "num_drafted": stats.num_drafted,
            "num_accepted": stats.num_accepted,
            "num_draft_passes": sum(drafter.num_passes for drafter in stats.drafters),
        }


class OwnRunner:
    """An own mode of a running server.

    Args:
        server: The server.
        mode: The mode.
        settings: How large its drafts are.

    Raises:
        SetupError: The server has no drafter for the mode.
    """

    def __init__(self, server: Server, mode: Mode, settings: Settings) -> None:
        self.way = Way(mode, server.label)
        self.server = server
        self._options: SpeculationOptions = speculation(mode, server.pipeline, settings.chain_length)
        if settings.max_nodes is not None and mode not in OWN_SIZES:
            self._options.max_nodes = settings.max_nodes
        info = server.target
        # Where drafts are verified, a pass has as many rows as the draft has nodes.
        work = target_work(info) if mode == PLAIN else None
        self.description = Description(info.weight_format, info.kernel, info.num_threads, work)

    async def generate(self, prompt: Sequence[int], sampling: str, max_tokens: int) -> Sample:
        """See `Runner`."""
        stream = await self.stream(prompt, sampling, max_tokens)
        return Sample(
            stream.token_ids,
            stream.end - stream.begin,
            stream.arrivals[0][0] - stream.begin,
            stream.arrivals[0][1],
            stream.counts,
        )

    async def prefill(self, prompt: Sequence[int]) -> float:
        """See `Runner`."""
        stream = await self.stream(prompt, "greedy", 1)
        return stream.arrivals[0][0] - stream.begin

    async def stream(
        self,
        prompt: Sequence[int],
        sampling: str,
        max_tokens: int,
        *,
        ignore_eos: bool = False,
        max_nodes: int | None = None,
    ) -> Stream:
        """Runs a generation and notes when its tokens come.

        Args:
            prompt: Token ids.
            sampling: One of `SAMPLINGS`.
            max_tokens: Most tokens to generate.
            ignore_eos: Whether to go on after end-of-sequence tokens.
            max_nodes: Most nodes in a draft; None for what the settings say.
        """
        request = GenerateRequest(
            token_ids=TokenIds(token_ids=prompt),
            sampling=self._sampling(sampling),
            stop=StopOptions(max_tokens=max_tokens, ignore_eos=ignore_eos),
            speculation=self._options,
            # A prompt that comes again must be computed again.
            tenant=f"bench-{next(_numbers)}",
        )
        if max_nodes is not None:
            request.speculation.max_nodes = max_nodes
        arrivals: list[tuple[float, int]] = []
        token_ids: list[int] = []
        origins: list[str] = []
        completion: Completion | None = None
        begin = time.perf_counter()
        async for event in self.server.client.generate(request):
            if isinstance(event, Completion):
                completion = event
            elif event.token_ids:
                arrivals.append((time.perf_counter(), len(event.token_ids)))
                token_ids += event.token_ids
                origins += event.origins
        end = time.perf_counter()
        if completion is None or not arrivals:
            raise SetupError(f"{self.way.name}: the server ended a generation without tokens")
        return Stream(begin, tuple(arrivals), end, tuple(token_ids), tuple(origins), completion)

    def _sampling(self, name: str) -> SamplingOptions:
        options = SamplingOptions()
        options.CopyFrom(SAMPLINGS[name])
        if options.HasField("top_k"):
            # The server refuses to choose from more tokens than there are.
            options.top_k = min(options.top_k, self.server.model.vocabulary_size)
        return options

    def processes(self) -> Mapping[str, int]:
        """See `Runner`."""
        if not self.server.is_local:
            return {}
        stages = [*self.server.pipeline.drafters, self.server.pipeline.verifier]
        found = {f"{stage.name}, {self.server.label}": stage.info.process_id for stage in stages}
        if self.server.holds_orchestrator:
            found["orchestrator and bench"] = os.getpid()
        return found


_numbers = itertools.count(time.time_ns())
