from hypothesis import given
from hypothesis import strategies as st

from stagespec.tree import EMPTY_DRAFT, ROOT, DraftTree, most_probable, repair
from stagespec.v1.draft_pb2 import DraftTree as DraftTreeMessage

VOCABULARY_SIZE = 6


@st.composite
def messages(draw):
    """Trees from outside: mostly sensible, with every kind of fault mixed in."""
    size = draw(st.integers(0, 14))
    log_probs = st.one_of(
        st.floats(-5, 0, width=32), st.sampled_from([float("nan"), float("-inf"), float("inf"), 0.5])
    )
    message = DraftTreeMessage(
        token_ids=draw(st.lists(st.integers(-1, VOCABULARY_SIZE), min_size=size, max_size=size)),
        parents=[draw(st.integers(-1, max(i, 0))) for i in range(size)],
        log_probs=draw(st.one_of(st.just([]), st.lists(log_probs, min_size=size, max_size=size))),
        drafter_indices=draw(
            st.one_of(st.just([]), st.lists(st.integers(0, 3), min_size=size, max_size=size))
        ),
    )
    if size and draw(st.booleans()):
        field = draw(st.sampled_from([message.token_ids, message.parents]))
        del field[draw(st.integers(0, size - 1)) :]
    return message


def slow_paths(message: DraftTreeMessage, max_depth: int) -> dict[tuple[int, ...], int]:
    """Every legal path of tokens -> the first node that spells it, from the rules alone."""
    size = len(message.token_ids)
    log_probs = list(message.log_probs) or [0.0] * size
    owners = list(message.drafter_indices) or [0] * size
    usable = min(size, len(message.parents), len(log_probs), len(owners))
    paths: dict[tuple[int, ...], int] = {}
    spelled: dict[int, tuple[int, ...] | None] = {-1: ()}
    for node in range(usable):
        parent = message.parents[node]
        prefix = spelled.get(parent) if parent < node else None
        token_id, log_prob = message.token_ids[node], log_probs[node]
        legal = 0 <= token_id < VOCABULARY_SIZE and float("-inf") < log_prob <= 0.0
        spelled[node] = None
        if prefix is not None and legal and len(prefix) < max_depth:
            spelled[node] = (*prefix, token_id)
            paths.setdefault((*prefix, token_id), node)
    return paths


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))]


@given(messages(), st.integers(1, 5))
def test_repair_keeps_exactly_the_legal_paths(message, max_depth):
    repaired = repair(message, vocabulary_size=VOCABULARY_SIZE, max_nodes=100, max_depth=max_depth)
    expected = slow_paths(message, max_depth)
    assert dict(zip(paths_of(repaired.tree), repaired.sent_indices, strict=True)) == expected
    assert [message.token_ids[i] for i in repaired.sent_indices] == list(repaired.tree.token_ids)


@given(messages(), st.integers(0, 8))
def test_cutting_keeps_the_most_probable_nodes_with_their_parents(message, max_nodes):
    tree = repair(message, vocabulary_size=VOCABULARY_SIZE, max_nodes=100).tree
    kept = most_probable(tree, max_nodes)
    assert len(kept) == min(len(tree), max_nodes)
    assert all(tree.parents[node] == ROOT or tree.parents[node] in kept for node in kept)
    totals = tree.path_log_probs
    dropped = set(range(len(tree))) - set(kept)
    assert all(totals[k] >= totals[d] for k in kept for d in dropped)
    cut = repair(message, vocabulary_size=VOCABULARY_SIZE, max_nodes=max_nodes)
    assert paths_of(cut.tree) == [paths_of(tree)[node] for node in kept]


@given(messages())
def test_a_legal_tree_survives_the_round_trip_unchanged(message):
    tree = repair(message, vocabulary_size=VOCABULARY_SIZE, max_nodes=100).tree
    again = repair(tree.to_proto(), vocabulary_size=VOCABULARY_SIZE, max_nodes=100)
    assert (again.tree, again.num_dropped) == (tree, 0)
    assert tree.depths == [len(path) - 1 for path in paths_of(tree)]
    spelled = {path: node for node, path in enumerate(paths_of(tree))}
    children = {
        (parent, token): node for parent, found in tree.children().items() for token, node in found.items()
    }
    assert children == {(spelled.get(path[:-1], ROOT), path[-1]): node for path, node in spelled.items()}


def test_dropped_nodes_are_counted_and_merged_ones_are_not():
    message = DraftTreeMessage(token_ids=[1, 1, 2, 9, 3], parents=[-1, -1, 1, -1, 3])
    repaired = repair(message, vocabulary_size=VOCABULARY_SIZE, max_nodes=8)
    assert (paths_of(repaired.tree), repaired.num_dropped) == ([(1,), (1, 2)], 2)
    assert repair(DraftTreeMessage(token_ids=[1]), vocabulary_size=6, max_nodes=8).tree == EMPTY_DRAFT
