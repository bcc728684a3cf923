"""The part that counts what drafts bring: steps, passes and tokens, however fast or slow the machine is."""

from collections import Counter
from typing import Any

from deploy.bench.plan import Unit
from deploy.bench.served import OwnRunner
from deploy.bench.served_part import Served
from deploy.bench.settings import Settings
from deploy.cli.output import plain


async def count_unit(settings: Settings, everything: Served, unit: Unit) -> dict[str, Any]:
    """One generation as counts. Several may run at once."""
    runner = everything.runners[unit.subject]
    assert isinstance(runner, OwnRunner)
    sampling, max_nodes, index = str(unit.key[2]), int(unit.key[3]), int(unit.key[4])
    prompt = everything.prompts[index]
    stream = await runner.stream(prompt, sampling, settings.max_tokens, max_nodes=max_nodes or None)
    stats = stream.completion.speculation
    return {
        "num_prompt_tokens": len(prompt),
        "num_tokens": len(stream.token_ids),
        **stream.counts,
        "num_levels": stats.num_levels,
        "num_rounds": stats.num_rounds,
        "num_skipped_steps": sum(drafter.num_skipped_steps for drafter in stats.drafters),
        "accepted_histogram": list(stats.accepted_histogram),
        "max_nodes": stream.completion.effective.speculation.max_nodes,
        "origins": dict(Counter(stream.origins)),
        # Short, as there are many: drafter, depth, rank, reached, accepted.
        "ranks": [
            [each.drafter, each.depth, each.rank, each.num_reached, each.num_accepted] for each in stats.ranks
        ],
        "decode_work": plain(stats.decode_work),
        "token_ids": list(stream.token_ids),
    }
