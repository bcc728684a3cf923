"""The load check: a small tree in one pass against each of its paths run alone by the unmodified model.

A model whose cache or positions cannot be branched and rolled back fails it, whatever the reason.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.causal_lm.forward import Forward, Segment
from services.causal_lm.rows import NO_ROW, Rows
from services.causal_lm.settings import ModelSettings

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest difference allowed, as a share of the largest logit, by number format of the activations."""

TOLERANCE_INT8 = 1e-3
"""With 8-bit weights activations are rounded too, to 16 bits, where the last bit of a sum may decide."""

CONTEXT_LENGTH = 9
PARENTS = (-1, -1, 0, 0, 2, 1, 4)
COMMITTED = (0, 2, 4)
"""A path of the tree that the second pass takes as committed."""


class UnservableModelError(ValueError):
    """The model cannot be served; the text names the model and the reason."""


@torch.inference_mode()
def reference(model: PreTrainedModel, vocabulary_size: int) -> list[Tensor]:
    """Logits after the context and after every path of the check's tree, each run alone without a cache.

    Args:
        model: As transformers loaded it.
        vocabulary_size: Tokens to choose from.

    Returns:
        One row of logits for the context and one for each node. [vocab]
    """
    context, token_ids = _sequence(vocabulary_size)
    paths = [[], *(_path(node) for node in range(len(PARENTS)))]
    sequences = [context + [token_ids[node] for node in path] for path in paths]
    device = model.device
    return [
        model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1].float()
        for ids in sequences
    ]


def compare(run: Forward, settings: ModelSettings, vocabulary_size: int, expected: Sequence[Tensor]) -> float:
    """Runs the tree in one pass, commits a path, rolls back and runs again; compares all of it.

    Args:
        run: The forward pass to check.
        settings: The model's name and number formats.
        vocabulary_size: As given to `reference`.
        expected: From `reference`.

    Returns:
        The largest difference found, as a share of the largest logit.

    Raises:
        UnservableModelError: It is above the tolerance for the number formats.
    """
    name = settings.model
    context, token_ids = _sequence(vocabulary_size)
    rows = run.new_rows()
    try:
        found = _run_tree(run, rows, context, token_ids)
        # The deepest path becomes context; then its last token is rolled back and computed again.
        longer = context + [token_ids[node] for node in COMMITTED]
        rows.follow(longer)
        assert rows.path_length == len(longer)
        rows.follow(longer[:-1])
        rows.add(rows.path_length - 1, longer[-1])
        rows.grow_path(len(longer))
        again = run([Segment(rows, 1, [0])])[0].logits[0]
    except (RuntimeError, TypeError, AttributeError) as error:
        text = f"model {name!r} does not run token trees: {error}"
        raise UnservableModelError(text) from error
    pairs = [*zip(found, expected, strict=True), (again, expected[1 + COMMITTED[-1]])]
    scale = max(float(logits.abs().max()) for logits in expected)
    worst = max(float((a - b).abs().max()) for a, b in pairs) / scale
    tolerance = TOLERANCE_INT8 if settings.weight_format == "int8" else TOLERANCES[settings.dtype]
    if not worst <= tolerance:
        raise UnservableModelError(
            f"model {name!r} gives other logits for a token tree than for its paths alone: they differ by "
            f"{worst:.1e} of the largest logit and the limit is {tolerance:.0e}. Its cache or its positions "
            "cannot be branched or rolled back"
        )
    return worst


def _run_tree(run: Forward, rows: Rows, context: list[int], token_ids: list[int]) -> list[Tensor]:
    parent = NO_ROW
    for token_id in context:
        parent = rows.add(parent, token_id)
    rows.grow_path(len(context))
    nodes: list[int] = []
    for token_id, node in zip(token_ids, PARENTS, strict=True):
        nodes.append(rows.add(parent if node < 0 else nodes[node], token_id))
    wanted = range(len(context) - 1, len(context) + len(nodes))
    return list(run([Segment(rows, len(rows), wanted)])[0].logits)


def _sequence(vocabulary_size: int) -> tuple[list[int], list[int]]:
    """A fixed, arbitrary context and the tokens of the tree's nodes; siblings differ."""
    tokens = [(7 + i) % vocabulary_size for i in range(CONTEXT_LENGTH + len(PARENTS))]
    return tokens[:CONTEXT_LENGTH], tokens[CONTEXT_LENGTH:]


def _path(node: int) -> list[int]:
    return [] if node < 0 else [*_path(PARENTS[node]), node]
