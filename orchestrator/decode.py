"""The decode loop: drafters grow a draft, the verifier decides, what it committed is handed out.

The loop knows neither transport nor text. Without drafters it is plain decoding, and since nothing a drafter
does can change a draw of the target, the tokens are the same with any of them (see stagespec/noise.py).
"""

import itertools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from orchestrator.roles import Budget, Drafter, DraftLimits, Verdict, Verifier
from orchestrator.stopping import Output, Stopper
from orchestrator.work import FIRST_STEP
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.verifier_pb2 import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step.

    Attributes:
        output: The committed tokens and their text, cut where the generation ends.
        verdict: The target's decision, uncut.
        draft: What was sent to the verifier.
        num_rounds: Rounds over the drafters that made it.
    """

    output: Output
    verdict: Verdict
    draft: DraftTree
    num_rounds: int

    @property
    def num_levels(self) -> int:
        """Levels of the draft."""
        return max(self.draft.depths, default=-1) + 1

    @property
    def owners(self) -> list[int | None]:
        """For each token of the output the index of the drafter that proposed it; None for the target."""
        accepted: list[int | None] = [self.draft.drafter_indices[n] for n in self.verdict.accepted_nodes]
        return [*accepted, None][: len(self.output.token_ids)]

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each token of the output, if the request asked for them."""
        return self.verdict.logprobs[: len(self.output.token_ids)]


async def decode(
    prompt: Sequence[int],
    drafters: Callable[[], Sequence[Drafter]],
    verifier: Verifier,
    limits: DraftLimits,
    stopper: Stopper,
) -> AsyncGenerator[Step, None]:
    """Continues a prompt, some committed tokens at a time, until a stop rule fires.

    Args:
        prompt: Token ids to continue. At least one.
        drafters: Gives the drafters to use, in order. Read at each step, so that a swap reaches running
            requests; no drafters is plain decoding.
        verifier: The target.
        limits: How far a draft may grow.
        stopper: Cuts the committed tokens where the generation ends.

    Yields:
        One step after the other; the last one's output says why it is the last.

    Raises:
        RpcError: The verifier is lost, or cannot decide.
    """
    context = list(prompt)
    for step_id in itertools.count(FIRST_STEP):
        budget = limits.budget(len(context), stopper.num_left)
        lineup = drafters() if budget.has_room else ()
        draft, num_rounds = await grow_draft(context, lineup, budget, limits, step_id)
        verdict = await verifier.verify(context, draft, step_id)
        output = stopper.clip(verdict.token_ids)
        context.extend(output.token_ids)
        yield Step(output, verdict, draft, num_rounds)
        if output.finish is not None:
            return


async def grow_draft(
    context: Sequence[int], drafters: Sequence[Drafter], budget: Budget, limits: DraftLimits, step_id: int
) -> tuple[DraftTree, int]:
    """Passes a draft along the drafters, for as many rounds as are worth their price or fill it.

    Returns:
        The draft, and the number of rounds it took.
    """
    draft, num_rounds, gain = EMPTY_DRAFT, 0, math.inf
    while drafters and num_rounds < limits.max_rounds and gain > budget.pass_price:
        num_before, gain = len(draft), 0.0
        for drafter in drafters:
            proposal = await drafter.propose(context, draft, budget, step_id, num_rounds)
            draft, gain = proposal.draft, max(gain, proposal.next_round_gain)
        num_rounds += 1
        if len(draft) <= num_before:
            break  # Nothing was added: another round would ask the same question again.
        if limits.fixed_size:
            # Whoever drafts one chain has nothing to say about the next round, and is asked all the same.
            gain = math.inf if len(draft) < budget.max_nodes else 0.0
    return draft, num_rounds
