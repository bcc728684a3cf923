"""The accept rule: one draw a node, follow the child that equals it, stop at the first miss.

The draw at a node is a pure function of the token path to it (see `services.sampling.draw`), so the tokens
that come out are those of plain decoding with the same seed: the tree decides only how many of them one pass
yields. In particular each token is an exact draw from the target's processed distribution, whatever was
drafted.
"""

from collections.abc import Callable

from stagespec.tree import ROOT, DraftTree


def walk(tree: DraftTree, draw: Callable[[int], int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walks a tree from the root along the target's own draws.

    >>> tree = DraftTree((5, 6, 7), (-1, -1, 1), (0.0,) * 3, (0,) * 3)
    >>> draws = {-1: 6, 1: 7, 2: 9}
    >>> walk(tree, lambda node: draws[node])
    ((1, 2), (6, 7, 9))

    Args:
        tree: The draft; siblings have distinct tokens.
        draw: The target's token after a node, or after the context for `ROOT`. Called once for each node
            visited, parents before children.

    Returns:
        The accepted nodes, and the committed tokens: theirs and the bonus token.
    """
    children = tree.children()
    node = ROOT
    accepted: list[int] = []
    committed: list[int] = []
    while True:
        token_id = draw(node)
        committed.append(token_id)
        child = children.get(node, {}).get(token_id)
        if child is None:
            return tuple(accepted), tuple(committed)
        accepted.append(child)
        node = child
