"""What a stage did, counted: within one request, and over all requests since the server started."""

from dataclasses import dataclass, fields

from stagespec.rpc import to_duration
from stagespec.v1.pipeline_pb2 import StageTotals


@dataclass(slots=True)
class Counters:
    """Counts of one stage.

    Attributes:
        num_calls: Requests sent to it.
        num_failures: Requests that failed or were late.
        num_nodes: Nodes it proposed that were sent to the verifier, or nodes it verified.
        num_accepted: Those of them that were accepted.
        num_passes: Forward passes of its model.
        num_dropped_nodes: Nodes it sent that broke a rule or a limit.
        num_restarts: Times it came back at a new address.
        seconds: Time spent waiting for it.
    """

    num_calls: int = 0
    num_failures: int = 0
    num_nodes: int = 0
    num_accepted: int = 0
    num_passes: int = 0
    num_dropped_nodes: int = 0
    num_restarts: int = 0
    seconds: float = 0.0

    def add(self, more: "Counters") -> None:
        """Adds every count of `more`."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))

    def to_proto(self) -> StageTotals:
        """The message that shows them."""
        return StageTotals(
            num_calls=self.num_calls,
            num_failures=self.num_failures,
            num_nodes=self.num_nodes,
            num_accepted=self.num_accepted,
            num_passes=self.num_passes,
            num_dropped_nodes=self.num_dropped_nodes,
            num_restarts=self.num_restarts,
            time=to_duration(self.seconds),
        )
