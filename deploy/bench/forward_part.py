"""The parts that run the target's forward pass alone, in a process for each variant."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from deploy.bench.bench import Bench
from deploy.bench.child import Child
from deploy.bench.plan import Unit
from deploy.bench.served import with_variant
from deploy.prompts import Prompt

FORWARD_PARTS = ("verify", "linear", "quality")


@asynccontextmanager
async def targets(bench: Bench, units: Sequence[Unit]) -> AsyncIterator[dict[str, Child]]:
    """Starts a process with the target alone for each variant that the units need, by label.

    Raises:
        SetupError: A target cannot be loaded.
    """
    wanted = {unit.subject for unit in units}
    async with AsyncExitStack() as stack:
        children = {}
        for variant in bench.settings.variants:
            if variant.label not in wanted:
                continue
            name = f"target {variant.label}"
            bench.note(f"loading {name} ...")
            _, stage = with_variant(bench.config, variant).target
            child = await Child.start(name, "target_worker", asdict(stage.settings), stage, bench.timeout)
            stack.push_async_callback(child.stop)
            children[variant.label] = child
            facts = await child.ask("describe")
            bench.records.add(("variant", variant.label), facts)
            limit = facts["max_context_length"]
            for context in bench.settings.contexts if "verify" in bench.settings.parts else ():
                if context + max(bench.settings.row_counts) > limit:
                    bench.skip(f"verify at {context}", f"the target's context ends at {limit}")
        yield children


class ForwardTimer:
    """Takes the figures of the forward pass, each at the context that is wanted.

    Args:
        children: The targets' processes by label.
        prompts: Text to find out on how well a target computes.
    """

    def __init__(self, children: Mapping[str, Child], prompts: Sequence[Prompt]) -> None:
        self._children = children
        self._prompts = prompts
        self._contexts: dict[str, int] = {}

    async def take(self, unit: Unit) -> dict[str, Any]:
        """Seconds of a pass or of its linear layers alone, or how near its probabilities are to float32."""
        child = self._children[unit.subject]
        if unit.part == "quality":
            return dict(await child.ask("quality", text=self._prompts[int(unit.key[2])].plain_text))
        context, num_rows = int(unit.key[2]), int(unit.key[3])
        if unit.part == "linear":
            return {"seconds": await child.ask("linear", num_rows=num_rows)}
        if self._contexts.get(unit.subject) != context:
            await child.ask("fill", context=context)
            self._contexts[unit.subject] = context
        return {"seconds": await child.ask("forward", num_rows=num_rows)}
