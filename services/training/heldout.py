"""What a draft would bring, on sequences that it was not trained on."""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.training.batches import Batch
from services.training.student import Student

AGREEMENTS = (1, 4, 8)


@torch.no_grad()
def held_out_report(student: Student, batches: Iterable[Batch], block: int) -> dict[str, float]:
    """Agreement with the target, and how much of a draft it would accept.

    Agreement top-k: how often the target's likeliest token is among the draft's k likeliest, over all
    positions, context rows alone; `top_1_depth_d`: the same under d drafted tokens. Accepted lengths: tokens
    of the sequence that lie in a draft along it, from a place in it to the end of the block, for a chain of
    the draft's likeliest tokens and for a tree of its 4 or 8 likeliest at every node. Since a draft's path is
    then the sequence's own, drafted rows are just what they would be in use, and the count is exact.
    """
    hits: dict[str, list[Tensor]] = {}
    lengths: dict[int, list[Tensor]] = {}
    num_positions = 0
    for batch in batches:
        logits = student.logits(batch)
        ranked = student.token_ids[logits.topk(max(AGREEMENTS), dim=1).indices]
        likeliest, drawn = (ids.unsqueeze(1) == ranked for ids in (batch.top_ids[:, 0], batch.next_ids))
        context = batch.depths == 0
        num_positions += int(context.sum())
        for count in AGREEMENTS:
            found = likeliest[:, :count].any(dim=1)
            hits.setdefault(f"top_{count}", []).append(found[context])
            lengths.setdefault(count, []).append(_accepted(batch, drawn[:, :count].any(dim=1)))
        for depth in range(1, block + 1) if student.reads_features else ():
            hits.setdefault(f"top_1_depth_{depth}", []).append(likeliest[batch.depths == depth, 0])
    report = {name: float(torch.cat(found).float().mean()) for name, found in hits.items()}
    if student.reads_features:
        report |= {
            "accepted_chain" if count == 1 else f"accepted_tree_{count}": float(torch.cat(found).mean())
            for count, found in lengths.items()
        }
    return report | {"num_held_out_positions": float(num_positions)}


def _accepted(batch: Batch, hit: Tensor) -> Tensor:
    """Tokens accepted of each block's draft.

    The draft of a block begins with the context row before it and goes on with the block's own rows.
    """
    sequence, label = batch.labels
    drafted = batch.depths > 0
    hit_at = {
        (s, k, d): h
        for s, k, d, h in zip(
            sequence.tolist(), label.tolist(), batch.depths.tolist(), hit.tolist(), strict=True
        )
    }
    found = []
    for s, k, d in zip(
        sequence[drafted].tolist(), label[drafted].tolist(), batch.depths[drafted].tolist(), strict=True
    ):
        if d != 1:
            continue
        count, depth = 0, 0
        while hit_at.get((s, k - 1 + depth, depth), False):
            count, depth = count + 1, depth + 1
        found.append(float(count))
    return torch.tensor(found)
