"""The stages as one request uses them: its own clients, kept in step with the shared pipeline."""

import secrets
from collections import Counter
from collections.abc import Sequence

from orchestrator.backoff import Backoff
from orchestrator.counters import Counters
from orchestrator.decode import Step
from orchestrator.drafter_client import DrafterClient
from orchestrator.observations import combine
from orchestrator.pipeline import Pipeline
from orchestrator.request import Generation
from orchestrator.settings import TimeoutSettings
from orchestrator.stage import Stage
from orchestrator.stream import Patience
from orchestrator.verifier_client import VerifierClient
from stagespec.v1.observation_pb2 import Observation, ObservationRequest


class Session:
    """One request's hold on the stages.

    Attributes:
        verifier: The target.
        clients: Every drafter that was used, by the index that marks its nodes.
    """

    def __init__(self, pipeline: Pipeline, generation: Generation, timeouts: TimeoutSettings) -> None:
        # A client may send one request id twice; sessions must still differ at the stages.
        self._id = f"{generation.request_id}-{secrets.token_hex(4)}"
        self._pipeline = pipeline
        self._generation = generation
        backoff = Backoff(timeouts.backoff_s, timeouts.max_backoff_s)
        self._drafter_patience = Patience(
            timeouts.propose_s, timeouts.propose_per_token_s, timeouts.late_reply_s, backoff
        )
        self.clients: list[DrafterClient] = []
        self._in_use: dict[Stage, DrafterClient] = {}
        self.verifier = VerifierClient(
            pipeline.verifier,
            self._id,
            generation.sampling,
            generation.tenant,
            generation.num_logprobs,
            generation.vocabulary_size,
            Patience(timeouts.verify_s, timeouts.verify_per_token_s, 0.0, backoff),
            timeouts.verifier_recovery_s,
            self._wishes,
            self._observe,
        )

    def drafters(self) -> Sequence[DrafterClient]:
        """The drafters to use now, in order. Those that left the pipeline are closed."""
        stages = self._lineup()
        for gone in self._in_use.keys() - set(stages):
            self._in_use.pop(gone).close()
        for stage in stages:
            if stage not in self._in_use:
                self._in_use[stage] = self._new_client(stage)
        return [self._in_use[stage] for stage in stages]

    def account(self, step: Step) -> None:
        """Writes the nodes of a step to their drafters' accounts."""
        proposed = Counter(step.draft.drafter_indices)
        accepted = Counter(step.draft.drafter_indices[node] for node in step.verdict.accepted_nodes)
        for index, num_nodes in proposed.items():
            self.clients[index].count(Counters(num_nodes=num_nodes, num_accepted=accepted[index]))

    def close(self) -> None:
        """Frees the session at every stage. Never waits."""
        self.verifier.close()
        for client in self.clients:
            client.close()

    def _lineup(self) -> list[Stage]:
        names = self._generation.drafters
        if names is None:
            return list(self._pipeline.drafters)
        by_name = {stage.name: stage for stage in self._pipeline.drafters}
        return [by_name[name] for name in names if name in by_name]

    def _new_client(self, stage: Stage) -> DrafterClient:
        client = DrafterClient(
            stage,
            len(self.clients),
            self._id,
            self._generation.sampling,
            self._generation.tenant,
            self._generation.vocabulary_size,
            self._drafter_patience,
        )
        self.clients.append(client)
        return client

    def _wishes(self) -> ObservationRequest:
        return combine(stage.info.observations for stage in self._in_use)

    def _observe(self, observations: Sequence[Observation]) -> None:
        for client in self._in_use.values():
            client.observations.put(observations)
