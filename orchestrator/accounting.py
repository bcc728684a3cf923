"""What a generation reports about itself: tokens, drafts, times."""

import time
from collections.abc import Iterator, Sequence

from orchestrator.decode import Step
from orchestrator.drafter_client import DrafterClient
from orchestrator.pipeline import TARGET_ORIGIN
from orchestrator.ranks import RankAccount
from orchestrator.request import Generation
from orchestrator.session import Session
from orchestrator.stopping import Finish
from stagespec.rpc import to_duration
from stagespec.v1.generation_pb2 import (
    Chunk,
    Completion,
    DecodeWork,
    DrafterStats,
    GenerationTimings,
    SpeculationStats,
    Usage,
)


class Account:
    """Follows one generation, from the moment it may run to its end.

    Args:
        arrived: When the request came, by `time.monotonic`.
    """

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._started = self._first_token = time.monotonic()
        self._finish: Finish | None = None
        self._num_tokens = self._num_first = 0
        self._num_drafted = 0
        self._num_rounds = 0
        self._num_levels = 0
        self._histogram: list[int] = []
        self._ranks = RankAccount()

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self._num_tokens} tokens in {sum(self._histogram)} steps and {seconds:.2f} s"

    def add(self, step: Step) -> None:
        """Takes one step into the account."""
        if not self._histogram:
            self._first_token = time.monotonic()
            self._num_first = len(step.output.token_ids)
        num_accepted = len(step.verdict.accepted_nodes)
        self._histogram.extend([0] * (num_accepted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1
        self._num_tokens += len(step.output.token_ids)
        self._num_drafted += len(step.draft)
        self._num_rounds += step.num_rounds
        self._num_levels += step.num_levels
        self._ranks.add(step.draft, step.verdict.accepted_nodes)
        self._finish = step.output.finish

    def completion(self, generation: Generation, session: Session) -> Completion:
        """The last message of the generation."""
        now, finish = time.monotonic(), self._finish
        assert finish is not None, "the generation has not ended"
        completion = Completion(
            request_id=generation.request_id,
            finish_reason=finish.reason,
            usage=Usage(num_prompt_tokens=len(generation.prompt), num_completion_tokens=self._num_tokens),
            seed=generation.sampling.seed,
            effective=generation.effective,
            speculation=self._speculation(session),
            timings=GenerationTimings(
                queue=to_duration(self._started - self._arrived),
                first_token=to_duration(self._first_token - self._arrived),
                total=to_duration(now - self._arrived),
                drafting=to_duration(sum(client.counters.seconds for client in session.clients)),
                verifying=to_duration(session.verifier.counters.seconds),
            ),
            prompt_token_ids=generation.prompt if generation.return_prompt else (),
        )
        if finish.token_id is not None:
            completion.matched_token_id = finish.token_id
        if finish.string is not None:
            completion.matched_string = finish.string
        return completion

    def _speculation(self, session: Session) -> SpeculationStats:
        clients, num_steps = session.clients, sum(self._histogram)
        return SpeculationStats(
            num_steps=num_steps,
            num_drafted=self._num_drafted,
            num_accepted=sum(k * count for k, count in enumerate(self._histogram)),
            accepted_histogram=self._histogram,
            drafters=[_drafter_stats(client) for client in clients],
            num_rounds=self._num_rounds,
            num_levels=self._num_levels,
            ranks=self._ranks.to_proto([client.stage.name for client in clients]),
            decode_work=DecodeWork(
                num_tokens=self._num_tokens - self._num_first,
                num_steps=max(0, num_steps - 1),
                stages=[
                    *(client.work.to_proto(client.stage.name) for client in clients),
                    session.verifier.work.to_proto(TARGET_ORIGIN),
                ],
            ),
        )


def chunks(step: Step, clients: Sequence[DrafterClient], *, per_token: bool) -> Iterator[Chunk]:
    """The messages that carry a step's output: one, or one for each token."""
    token_ids, texts, logprobs = step.output.token_ids, step.output.texts, step.logprobs
    origins = [TARGET_ORIGIN if owner is None else clients[owner].stage.name for owner in step.owners]
    size = 1 if per_token else len(token_ids)
    for i in range(0, len(token_ids), size):
        part = slice(i, i + size)
        yield Chunk(
            token_ids=token_ids[part],
            text="".join(texts[part]),
            origins=origins[part],
            logprobs=logprobs[part],
        )


def _drafter_stats(client: DrafterClient) -> DrafterStats:
    counters = client.counters
    return DrafterStats(
        name=client.stage.name,
        num_proposed=counters.num_nodes,
        num_accepted=counters.num_accepted,
        num_passes=counters.num_passes,
        num_calls=counters.num_calls,
        num_failures=counters.num_failures,
        num_dropped_nodes=counters.num_dropped_nodes,
        num_skipped_steps=client.num_skipped_steps,
        skip_reason=client.skip_reason,
        time=to_duration(counters.seconds),
    )
