"""Other programs that decode the same model, each in a process of its own, loaded once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.bench.child import Child
from deploy.bench.gguf_files import gguf_file
from deploy.bench.roofline import Work, attention_flops
from deploy.bench.ways import Description, Sample, Way
from deploy.errors import SetupError
from deploy.stages import TargetStage
from services.target.settings import TargetSettings
from stagespec.v1.stage_pb2 import StageInfo

_GGUF_FORMATS = {"llamacpp-f32": "float32", "llamacpp-f16": "float16", "llamacpp-q4": None}
_CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CONTEXT_STEP = 256


@dataclass(frozen=True, slots=True)
class Place:
    """What a peer is started with.

    Attributes:
        target: What the target says of itself: the peer runs its model with its threads.
        context_length: Longest context that will be needed.
        gguf: File for llama.cpp; None for the bundled target's.
        timeout: Seconds to load.
        note: Told what is done.
    """

    target: StageInfo
    context_length: int
    gguf: Path | None
    timeout: float
    note: Callable[[str], None]

    @property
    def stage(self) -> TargetStage:
        """A stage with the target's threads and device.

        Raises:
            SetupError: The target does not say what it runs, and how.
        """
        target = self.target
        try:
            settings = TargetSettings(target.model, device=target.device, num_threads=target.num_threads)
        except ValueError as error:
            raise SetupError(f"the target does not say what it runs: {error}") from error
        return TargetStage("target", settings)


class PeerRunner:
    """A peer, loaded.

    Args:
        name: Which one.
        child: Its process.
        place: What it was started with.
        facts: What it says of itself.
    """

    def __init__(self, name: str, child: Child, place: Place, facts: Mapping[str, Any]) -> None:
        self.way = Way(name)
        self._child = child
        self._eos_token_ids = list(place.target.eos_token_ids)
        target = place.target
        # transformers caches in float32, llama.cpp in float16.
        cache = target.cache_bytes_per_token / _CACHE_BYTES.get(target.dtype, 4) * (4 if name == "hf" else 2)
        work = Work(facts["weight_bytes"], facts["num_weights"], cache, attention_flops(target.model))
        self.description = Description(
            facts["weight_format"], "", place.target.num_threads, work, facts["software"]
        )

    async def generate(self, prompt: Sequence[int], sampling: str, max_tokens: int) -> Sample:
        """See `Runner`."""
        found = await self._child.ask(
            "generate", prompt=list(prompt), max_tokens=max_tokens, eos_token_ids=self._eos_token_ids
        )
        return Sample(tuple(found["token_ids"]), found["seconds"], found["first_token_s"])

    async def prefill(self, prompt: Sequence[int]) -> float:
        """See `Runner`."""
        return float(await self._child.ask("prefill", prompt=list(prompt)))

    def processes(self) -> Mapping[str, int]:
        """See `Runner`."""
        return {self.way.name: self._child.process_id}

    async def stop(self) -> None:
        """Ends its process."""
        await self._child.stop()


async def start_peer(name: str, place: Place) -> PeerRunner:
    """Starts a peer.

    Args:
        name: One of `settings.PEERS`.
        place: What to start it with.

    Raises:
        SetupError: It cannot run here; the text says why.
    """
    target, stage = place.target, place.stage
    if name == "hf":
        settings = {"model": target.model, "device": target.device, "num_threads": target.num_threads}
        child = await Child.start(name, "hf_worker", settings, stage, place.timeout)
    else:
        if target.device != "cpu":
            raise SetupError(f"llama.cpp is compared on the CPU only, and the target runs on {target.device}")
        weight_format = _GGUF_FORMATS[name]
        path = await asyncio.to_thread(gguf_file, weight_format, target.model, place.gguf, place.note)
        context_length = -(-place.context_length // _CONTEXT_STEP) * _CONTEXT_STEP
        settings = {
            "path": str(path),
            "weight_format": weight_format or ("q4_1" if place.gguf is None else "gguf"),
            "num_threads": target.num_threads,
            "context_length": context_length,
        }
        child = await Child.start(name, "llama_worker", settings, stage, place.timeout)
    try:
        return PeerRunner(name, child, place, await child.ask("describe"))
    except BaseException:
        await child.stop()
        raise
