import math

import pytest

from orchestrator.drafter_client import credit
from orchestrator.observations import ObservationBuffer, combine
from orchestrator.verifier_client import find_flaw
from stagespec.tree import DraftTree
from stagespec.v1 import verifier_pb2
from stagespec.v1.observation_pb2 import Candidates, ElementType, Observation, ObservationRequest
from stagespec.v1.verifier_pb2 import TokenLogprobs


def tree(*nodes: tuple[int, int, int]) -> DraftTree:
    """From (token, parent, owner)."""
    tokens, parents, owners = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(tokens, parents, (0.0,) * len(nodes), owners)


def test_nodes_belong_to_whoever_put_their_path_into_the_hint():
    hint = tree((1, -1, 0), (2, 0, 1))
    answer = tree((1, -1, 7), (2, -1, 0), (2, 0, 7), (3, 2, 1))
    assert credit(answer, hint, 5).drafter_indices == (0, 5, 1, 5)


VERDICT = {"token_ids": [1, 2, 9], "accepted_nodes": [0, 2], "bonus_token_id": 9}


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({}, ""),
        ({"accepted_nodes": [0, 3]}, "no path"),
        ({"accepted_nodes": [2]}, "no path"),
        ({"accepted_nodes": [0, 2, 2]}, "no path"),
        ({"accepted_nodes": [-1]}, "no path"),
        ({"accepted_nodes": [0, 99]}, "no path"),
        ({"token_ids": [1, 3, 9]}, "committed"),
        ({"token_ids": [1, 2]}, "committed"),
        ({"token_ids": [1, 2, 9, 9]}, "committed"),
        ({"token_ids": []}, "committed"),
        ({"bonus_token_id": 4}, "committed"),
        ({"token_ids": [1, 2, 10], "bonus_token_id": 10}, "outside the vocabulary of 10"),
        ({"token_ids": [1, 2, -1], "bonus_token_id": -1}, "outside the vocabulary of 10"),
    ],
)
def test_a_verdict_must_fit_the_draft(change, flaw):
    draft = tree((1, -1, 0), (5, -1, 0), (2, 0, 0), (4, 1, 0))
    found = find_flaw(verifier_pb2.Verdict(**(VERDICT | change)), draft, 10, wants_logprobs=False)
    assert flaw in found
    assert bool(found) == bool(flaw)


@pytest.mark.parametrize(
    ("log_probs", "flaw"),
    [([-1.0] * 3, ""), ([-1.0] * 2, "2 log probabilities"), ([math.nan] * 3, "not a number")],
)
def test_log_probabilities_must_match_the_tokens(log_probs, flaw):
    draft = tree((1, -1, 0), (5, -1, 0), (2, 0, 0))
    entries = [TokenLogprobs(log_prob=value) for value in log_probs]
    verdict = verifier_pb2.Verdict(**VERDICT, logprobs=entries)
    assert flaw in find_flaw(verdict, draft, 10, wants_logprobs=True)


F16, F32, BF16 = (
    ElementType.ELEMENT_TYPE_FLOAT16,
    ElementType.ELEMENT_TYPE_FLOAT32,
    ElementType.ELEMENT_TYPE_BFLOAT16,
)


@pytest.mark.parametrize(
    ("wishes", "combined"),
    [
        ([], ObservationRequest()),
        ([ObservationRequest(), ObservationRequest(num_candidates=3)], ObservationRequest(num_candidates=3)),
        ([ObservationRequest(hidden_states=F16)] * 2, ObservationRequest(hidden_states=F16)),
        ([ObservationRequest(hidden_states=F16), ObservationRequest(hidden_states=BF16, num_candidates=2)],
         ObservationRequest(hidden_states=F32, num_candidates=2)),
    ],
)  # fmt: skip
def test_one_request_for_observations_serves_all(wishes, combined):
    assert combine(wishes) == combined


def observation(position: int, size: int) -> Observation:
    return Observation(
        first_position=position,
        num_positions=1,
        element_type=F16,
        hidden_states=bytes(size),
        candidates=[Candidates(token_id=1, candidate_ids=[2])],
    )


def test_observations_wait_within_a_bound_and_the_oldest_go_first():
    buffer = ObservationBuffer(ObservationRequest(hidden_states=F16), max_bytes=250)
    buffer.put([observation(0, 100), observation(1, 100), observation(2, 100)])
    assert [o.first_position for o in buffer.take()] == [1, 2]
    assert buffer.take() == []
    buffer.put([observation(3, 1000)])
    assert buffer.take() == []


def test_a_drafter_gets_only_what_it_asked_for():
    hidden = ObservationBuffer(ObservationRequest(hidden_states=F16))
    candidates = ObservationBuffer(ObservationRequest(num_candidates=1))
    nothing = ObservationBuffer(ObservationRequest())
    for buffer in (hidden, candidates, nothing):
        buffer.put([observation(4, 10)])
    [got] = hidden.take()
    assert (got.first_position, len(got.hidden_states), len(got.candidates)) == (4, 10, 0)
    [got] = candidates.take()
    assert (got.hidden_states, len(got.candidates)) == (b"", 1)
    assert nothing.take() == []
