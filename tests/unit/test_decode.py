import dataclasses
import math
from collections.abc import Sequence

import pytest

from orchestrator.decode import Step, decode
from orchestrator.detokenizer import Detokenizer
from orchestrator.roles import Budget, DraftLimits, Proposal, Verdict
from orchestrator.stopping import Stopper, StopRules
from stagespec.tree import EMPTY_DRAFT, DraftTree
from stagespec.v1.generation_pb2 import FinishReason
from stagespec.v1.verifier_pb2 import TokenLogprobs
from stagespec.vocabulary import Vocabulary

LIMITS = DraftLimits(max_nodes=16, max_depth=4, max_rounds=3, node_price=0.0, pass_price=0.5)


class Counting:
    """A target that counts up, modulo 8, and checks drafts as the verifier does."""

    def __init__(self) -> None:
        self.drafts: list[DraftTree] = []

    async def verify(self, context: Sequence[int], draft: DraftTree, step_id: int) -> Verdict:
        self.drafts.append(draft)
        assert step_id == len(self.drafts)
        children, node = draft.children(), -1
        tokens, accepted = [(context[-1] + 1) % 8], []
        while (node := children.get(node, {}).get(tokens[-1], -1)) >= 0:
            accepted.append(node)
            tokens.append((tokens[-1] + 1) % 8)
        return Verdict(tuple(tokens), tuple(accepted), tuple(TokenLogprobs(log_prob=-t) for t in tokens))


class Extending:
    """A drafter that lengthens the hint by so many right guesses a round, within the budget."""

    def __init__(self, index: int, num_levels: int, gains: Sequence[float] = ()) -> None:
        self.index = index
        self.num_levels = num_levels
        self.gains = gains
        self.calls: list[tuple[int, int, int]] = []
        self.budgets: list[Budget] = []

    async def propose(
        self, context: Sequence[int], hint: DraftTree, budget: Budget, step_id: int, round_number: int
    ) -> Proposal:
        self.calls.append((step_id, round_number, len(hint)))
        self.budgets.append(budget)
        token_ids, owners = list(hint.token_ids), list(hint.drafter_indices)
        for _ in range(self.num_levels):
            if len(token_ids) < min(budget.max_depth, budget.max_nodes):
                token_ids.append(((token_ids or context)[-1] + 1) % 8)
                owners.append(self.index)
        size = len(token_ids)
        draft = DraftTree(tuple(token_ids), tuple(range(-1, size - 1)), (0.0,) * size, tuple(owners))
        return Proposal(draft, self.gains[round_number] if round_number < len(self.gains) else 0.0)


async def run(
    drafters: Sequence[Extending],
    rules: StopRules,
    limits: DraftLimits = LIMITS,
    prompt: Sequence[int] = (0,),
) -> tuple[list[Step], Counting]:
    verifier = Counting()
    stopper = Stopper(rules, Detokenizer(Vocabulary((b"x",) * 8, frozenset())))
    return [step async for step in decode(prompt, lambda: drafters, verifier, limits, stopper)], verifier


async def test_without_drafters_it_is_plain_decoding():
    steps, verifier = await run([], StopRules(max_tokens=5))
    assert [list(step.output.token_ids) for step in steps] == [[1], [2], [3], [4], [5]]
    assert all(draft == EMPTY_DRAFT for draft in verifier.drafts)
    assert {step.num_rounds for step in steps} == {0}


async def test_drafters_pass_the_draft_on_and_each_token_knows_its_origin():
    first, second = Extending(0, 1), Extending(1, 2)
    steps, _ = await run([first, second], StopRules(max_tokens=8))
    assert [t for step in steps for t in step.output.token_ids] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert steps[0].owners == [0, 1, 1, None]
    assert first.calls[0] == (1, 0, 0)
    assert second.calls[0] == (1, 0, 1)


@pytest.mark.parametrize(
    ("gains", "num_rounds"),
    [
        ((), 1),  # nobody expects more
        ((0.5, 9.0), 1),  # not above the price of a pass
        ((0.6, 0.0), 2),
        ((9.0, 9.0, 9.0), 3),  # max_rounds
    ],
)
async def test_another_round_only_if_it_is_worth_its_price(gains, num_rounds):
    drafter = Extending(0, 1, gains)
    steps, _ = await run(
        [Extending(1, 0), drafter], StopRules(max_tokens=20), dataclasses.replace(LIMITS, max_depth=9)
    )
    assert steps[0].num_rounds == num_rounds
    assert drafter.calls[:num_rounds] == [(1, r, r) for r in range(num_rounds)]
    assert len(steps[0].draft) == num_rounds


@pytest.mark.parametrize(
    ("changes", "max_tokens", "num_rounds"),
    [
        ({"max_depth": 5, "max_nodes": 5, "max_rounds": 5}, 99, 5),
        ({"max_depth": 9, "max_nodes": 3, "max_rounds": 9}, 99, 3),  # as many nodes as may be
        ({"max_depth": 9, "max_nodes": 9, "max_rounds": 2}, 99, 2),
        ({"max_depth": 3, "max_nodes": 9, "max_rounds": 9}, 99, 4),  # the last one adds nothing
        ({"max_depth": 3, "max_nodes": 9, "max_rounds": 9, "max_children": 1}, 99, 3),  # and is spared
        ({"max_depth": 5, "max_nodes": 5, "max_rounds": 5, "max_children": 1}, 3, 2),  # near the end
    ],
)
async def test_drafts_of_a_fixed_size_grow_whatever_that_costs(changes, max_tokens, num_rounds):
    limits = dataclasses.replace(LIMITS, fixed_size=True, node_price=0.3, **changes)
    drafter = Extending(0, 1)  # which expects nothing of another round
    steps, _ = await run([drafter], StopRules(max_tokens=max_tokens), limits)
    assert steps[0].num_rounds == num_rounds
    grown = min(limits.max_depth, limits.max_nodes, limits.max_rounds, max_tokens - 1)
    assert (len(steps[0].draft), steps[0].num_levels) == (grown, grown)
    assert {(budget.node_price, budget.pass_price) for budget in drafter.budgets} == {(0.0, 0.0)}
    assert {budget.max_children for budget in drafter.budgets} == {limits.max_children}


async def test_rounds_end_when_a_round_adds_nothing_whatever_gain_is_claimed():
    limits = dataclasses.replace(LIMITS, max_rounds=10**9)
    steps, _ = await run([Extending(0, 1, [math.inf] * 100)], StopRules(max_tokens=10), limits)
    assert steps[0].num_rounds == LIMITS.max_depth + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
async def test_no_draft_is_deeper_than_what_is_left_to_generate(max_tokens):
    drafter = Extending(0, 8)
    limits = dataclasses.replace(LIMITS, max_depth=8)
    steps, verifier = await run([drafter], StopRules(max_tokens=max_tokens), limits)
    assert sum(len(step.output.token_ids) for step in steps) == max_tokens
    assert steps[-1].output.finish is not None
    assert steps[-1].output.finish.reason == FinishReason.FINISH_REASON_LENGTH
    assert [len(draft) for draft in verifier.drafts] == [max_tokens - 1]
    assert len(drafter.calls) == (max_tokens > 1)


async def test_drafts_stay_within_the_verifiers_context():
    drafter = Extending(0, 9)
    limits = dataclasses.replace(LIMITS, max_depth=9, max_context_length=10)
    steps, verifier = await run([drafter], StopRules(max_tokens=99, num_context_left=3), limits, [0] * 7)
    assert [budget.max_nodes for budget in drafter.budgets] == [3]
    assert [len(draft) for draft in verifier.drafts] == [2]
    assert sum(len(step.output.token_ids) for step in steps) == 3


async def test_everything_is_cut_at_the_same_place():
    steps, _ = await run([Extending(0, 4)], StopRules(max_tokens=9, token_ids=frozenset({2})))
    [step] = steps
    assert step.verdict.token_ids == (1, 2, 3, 4, 5)
    assert step.output.token_ids == (1, 2)
    assert step.output.texts == ("x", "")
    assert step.owners == [0, 0]
    assert [entry.log_prob for entry in step.logprobs] == [-1, -2]


async def test_the_line_of_drafters_is_read_at_each_step():
    first, second = Extending(0, 1), Extending(1, 3)
    lines = iter([[first], [second], [], [first, second]])
    stopper = Stopper(StopRules(max_tokens=9), Detokenizer(Vocabulary((b"x",) * 8, frozenset())))
    steps = [step async for step in decode([0], lambda: next(lines), Counting(), LIMITS, stopper)]
    assert [step.owners for step in steps] == [[0, None], [1, 1, 1, None], [None], [0, None]]
