"""One stage of the pipeline as all requests share it: where it is, what it is, how it has been doing."""

import time
from dataclasses import dataclass, field

import grpc

from orchestrator.backoff import Backoff
from orchestrator.counters import Counters
from stagespec.rpc import channel_options
from stagespec.v1.stage_pb2 import StageInfo


@dataclass(frozen=True, slots=True)
class StageAddress:
    """A stage's name in the pipeline, and where it listens, as host:port or unix:path."""

    name: str
    address: str


def connect(address: str) -> grpc.aio.Channel:
    """A channel to a stage. Nothing is sent before it is used."""
    return grpc.aio.insecure_channel(address, options=channel_options())


@dataclass(slots=True, eq=False)
class Stage:
    """A stage in use. Streams read `channel` whenever they open, so a stage may move while requests run.

    Attributes:
        name: Its name in the pipeline.
        address: Where it listens.
        channel: The connection to it.
        info: What it says about itself.
        backoff: How long requests stay away after it gave no sign of life.
        counters: What it did for all requests.
        trouble: Why it last gave no answer; empty if it did answer since.
    """

    name: str
    address: str
    channel: grpc.aio.Channel
    info: StageInfo
    backoff: Backoff
    counters: Counters = field(default_factory=Counters)
    trouble: str = ""
    _num_failures: int = 0
    _retry_at: float = 0.0

    @property
    def shunned(self) -> str:
        """Why a request should not open a stream to it now. Empty: it may.

        A stage that hangs would otherwise cost every new request a whole deadline.
        """
        return self.trouble if time.monotonic() < self._retry_at else ""

    def note_silence(self, reason: str) -> None:
        """It could not be reached, or gave no answer in time."""
        self.trouble = reason
        self._num_failures += 1
        self._retry_at = time.monotonic() + self.backoff.delay(self._num_failures)

    def note_answer(self) -> None:
        """It answered."""
        self.trouble, self._num_failures, self._retry_at = "", 0, 0.0

    async def move(self, address: str, channel: grpc.aio.Channel, info: StageInfo) -> None:
        """Goes on at another address. Streams to the old one fail, and open at the new one."""
        old = self.channel
        self.address, self.channel, self.info = address, channel, info
        self.counters.num_restarts += 1
        self.note_answer()
        await old.close()
