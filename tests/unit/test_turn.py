"""Sharing a pass: within its limits, with the best nodes, and nobody waits for ever."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from services.causal_lm.turn import DECODING_ROWS, Need, PassLimits, share_pass
from stagespec.tree import DraftTree


@st.composite
def drafts(draw) -> DraftTree:
    size = draw(st.integers(0, 8))
    return DraftTree(
        tuple(range(size)),
        tuple(draw(st.integers(-1, node - 1)) for node in range(size)),
        tuple(-draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in range(size)),
        (0,) * size,
    )


@st.composite
def needs(draw) -> list[Need]:
    found = []
    for index in range(draw(st.integers(1, 6))):
        draft = draw(drafts())
        # Some nodes may have rows already: their parents have them too.
        seen = draw(st.integers(0, len(draft)))
        num_context = draw(st.integers(0, 3) | st.integers(0, 90))
        found.append(Need(num_context, float(index), draft, range(seen, len(draft))))
    return found


LIMITS = st.builds(PassLimits, st.integers(2, 64), st.integers(1, 64), st.integers(1, 32))


@given(needs(), LIMITS, st.booleans())
def test_a_pass_keeps_its_limits_and_its_best_nodes(needs, limits, others_decode):
    shares = share_pass(needs, limits, others_decode=others_decode)
    assert len({share.index for share in shares}) == len(shares)
    num_rows = sum(share.num_context + len(share.nodes) for share in shares)
    assert num_rows <= limits.max_rows
    prompts = num_prompt_rows = 0
    kept, lost = [], []
    for share in shares:
        need = needs[share.index]
        assert share.num_context or not need.num_context
        assert share.num_context <= need.num_context
        if need.num_context > min(DECODING_ROWS, limits.chunk):
            prompts += 1
            num_prompt_rows += share.num_context
        if share.num_context < need.num_context:
            assert not share.nodes
            continue
        assert list(share.nodes) == sorted(share.nodes)
        chances = need.draft.path_log_probs
        for node in need.nodes:
            (kept if node in share.nodes else lost).append(chances[node])
        for node in share.nodes:
            parent = need.draft.parents[node]
            assert parent in share.nodes or parent not in need.nodes, "a node without its parent"
    if lost:
        assert num_rows == limits.max_rows, "nodes were pruned though there was room"
        assert min(kept, default=0.0) >= max(lost)
    beside = others_decode or len(shares) > prompts
    assert num_prompt_rows <= (min(limits.chunk, limits.shared_chunk) if beside else limits.chunk)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), LIMITS)
def test_neither_prompts_nor_decoders_starve(prompts, limits):
    """Three sessions decode without a pause, with drafts that fill every pass."""
    draft = DraftTree(tuple(range(80)), (-1,) * 80, (-0.1,) * 80, (0,) * 80)
    left = dict(enumerate(prompts))
    waiting = {-1 - index: index for index in range(3)}
    for now in range(3, 20_000):
        if not left:
            break
        queue = [*left, *waiting]
        asked = [
            Need(left[i], float(i - 10)) if i in left else Need(1, float(waiting[i]), draft, range(80))
            for i in queue
        ]
        for share in share_pass(asked, limits):
            who = queue[share.index]
            if who in waiting:
                waiting[who] = now  # answered, and back at once
            else:
                left[who] -= share.num_context
                if not left[who]:
                    del left[who]
        # The end of a prompt is read as if it decoded, and may be older.
        assert now - min(waiting.values()) <= 3 + DECODING_ROWS * len(prompts)
    assert not left


def test_a_short_prompt_passes_a_long_one_that_still_gets_half():
    limits = PassLimits(max_rows=512, chunk=256, shared_chunk=64)
    shares = share_pass([Need(4000, 1.0), Need(100, 2.0), Need(90, 3.0)], limits)
    assert {share.index: share.num_context for share in shares} == {0: 128, 2: 90, 1: 38}


def test_unknown_chances_are_shared_evenly():
    flat = DraftTree(tuple(range(6)), (-1, 0, 1, 2, 3, 4), (0.0,) * 6, (0,) * 6)
    limits = PassLimits(max_rows=8, chunk=8, shared_chunk=8)
    shares = share_pass([Need(1, 1.0, flat, range(6)), Need(1, 2.0, flat, range(6))], limits)
    assert [list(share.nodes) for share in shares] == [[0, 1, 2], [0, 1, 2]]
    assert math.fsum(share.num_context for share in shares) == 2
