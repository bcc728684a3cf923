"""What goes through a running server, with the peers beside it: generate, prefill, sessions, speculation."""

import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

from deploy.bench.bench import Bench
from deploy.bench.child import ChildError
from deploy.bench.machine import watch_idle
from deploy.bench.peers import Place, start_peer
from deploy.bench.plan import Unit, own_ways, plain_ways
from deploy.bench.processes import peak_memory
from deploy.bench.served import OwnRunner, Server, connect, serve
from deploy.bench.sessions import measure_sessions
from deploy.bench.settings import TIMED_PARTS
from deploy.bench.traffic import pass_sizes
from deploy.bench.ways import Runner
from deploy.client import Mode
from deploy.errors import SetupError

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Served:
    """What is running.

    Attributes:
        runners: By the names of their ways.
        prompts: Token ids of each prompt.
        vocabulary_size: Number of token ids.
        max_requests: Requests that each server takes at once.
    """

    runners: dict[str, Runner]
    prompts: list[list[int]]
    vocabulary_size: int
    max_requests: int


@asynccontextmanager
async def served(bench: Bench, units: Sequence[Unit]) -> AsyncIterator[Served]:
    """Starts the servers and peers that the units need, one after the other, and warms up what is timed.

    Raises:
        SetupError: A server does not start, or a prompt does not fit.
    """
    settings, wanted = bench.settings, {unit.subject for unit in units}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server) for server in _servers(bench)]
        target = servers[0].target
        prompts = [await servers[0].tokenize(prompt) for prompt in bench.prompts]
        longest = _check_lengths(bench, servers[0], prompts)
        runners: dict[str, Runner] = {}
        by_label = {server.label: server for server in servers}
        for label, server in by_label.items():
            sizes = {name: asdict(size) for name, size in pass_sizes(server.pipeline).items()}
            bench.records.add(("sizes", label), sizes)
        for way in dict.fromkeys([*own_ways(settings), *plain_ways(settings)]):
            if way.name in wanted:
                try:
                    runners[way.name] = OwnRunner(by_label[way.variant], cast(Mode, way.mode), settings)
                except SetupError as error:
                    bench.skip(way.name, str(error))
        place = Place(target, longest, bench.gguf, bench.timeout, bench.note)
        for name in settings.peers:
            if name in wanted:
                bench.note(f"starting {name} ...")
                try:
                    peer = await start_peer(name, place)
                except SetupError as error:
                    bench.skip(name, str(error))
                    continue
                stack.push_async_callback(peer.stop)
                runners[name] = peer
        is_timed = any(unit.part in TIMED_PARTS for unit in units)
        for name, runner in runners.items():
            try:
                if is_timed:
                    await runner.generate(prompts[0], "greedy", min(_WARM_UP_TOKENS, settings.max_tokens))
            except ChildError as error:
                bench.skip(name, str(error))
            bench.records.add(("way", name), {**asdict(runner.way), **asdict(runner.description)})
        if is_timed:
            await watch_idle(bench, runners.values())
        model = servers[0].model
        yield Served(runners, prompts, model.vocabulary_size, model.max_concurrent_requests)


async def measure_unit(bench: Bench, everything: Served, unit: Unit) -> dict[str, Any]:
    """One generation, prefill or set of sessions, and the memory it took its processes to."""
    runner, prompts = everything.runners[unit.subject], everything.prompts
    entry: dict[str, Any]
    if unit.part == "generate":
        sampling, index = str(unit.key[2]), int(unit.key[3])
        sample = await runner.generate(prompts[index], sampling, bench.settings.max_tokens)
        entry = {"num_prompt_tokens": len(prompts[index]), **sample.plain()}
    elif unit.part == "prefill":
        length, round_ = int(unit.key[2]), int(unit.key[3])
        # The same tokens for all that are compared, and others in each round.
        draw = random.Random(f"{length} {round_}")
        prompt = [draw.randrange(everything.vocabulary_size) for _ in range(length)]
        entry = {"seconds": await runner.prefill(prompt)}
    else:
        sampling, count, round_ = str(unit.key[2]), int(unit.key[3]), int(unit.key[4])
        chosen = [prompts[(round_ + index) % len(prompts)] for index in range(count)]
        own = cast(OwnRunner, runner)
        entry = dict(await measure_sessions(own, chosen, sampling, bench.settings.max_tokens))
        entry["num_prompt_tokens"] = sum(map(len, chosen)) / count
    memory = {name: peak_memory(number) for name, number in runner.processes().items()}
    return {**entry, "peak_bytes": {name: size for name, size in memory.items() if size is not None}}


def _servers(bench: Bench) -> list[AbstractAsyncContextManager[Server]]:
    """The servers of all variants, not yet started."""
    variants = bench.settings.variants
    if bench.address is not None:
        return [connect(bench.address, variants[0].label, own=False)]
    return [serve(bench.config, variant, bench.note) for variant in variants]


def _check_lengths(bench: Bench, server: Server, prompts: Sequence[Sequence[int]]) -> int:
    """Leaves out what the server cannot do, and returns the longest context that is needed.

    Raises:
        SetupError: A prompt does not fit, or drafts would be larger than the server allows.
    """
    settings, limit = bench.settings, server.model.max_context_length or sys.maxsize
    for index, prompt in enumerate(prompts):
        if len(prompt) + settings.max_tokens > limit:
            raise SetupError(
                f"prompt {index} has {len(prompt)} tokens and --max-tokens is {settings.max_tokens}; "
                f"together they exceed the target's context of {limit}"
            )
    most = server.model.max_nodes
    chain_length = settings.chain_length if "chain" in settings.modes else None
    for option, value in (("--max-nodes", settings.max_nodes), ("--chain-length", chain_length)):
        if value is not None and value > most:
            raise SetupError(f"{option} is {value}; the server allows at most {most} nodes in a draft")
    for budget in settings.budgets if "speculation" in settings.parts else ():
        if budget > most:
            bench.skip(f"{budget} nodes", f"the server allows at most {most} nodes in a draft")
    lengths = settings.prompt_lengths if "prefill" in settings.parts else ()
    for length in lengths:
        if length + 1 > limit:
            bench.skip(f"prefill at {length}", f"the target's context ends at {limit}")
    for count in settings.session_counts if "sessions" in settings.parts else ():
        if count > server.model.max_concurrent_requests:
            reason = f"the server generates {server.model.max_concurrent_requests} requests at the same time"
            bench.skip(f"{count} sessions", reason)
    fitting = [length + 1 for length in lengths if length + 1 <= limit]
    return max([*fitting, *(len(prompt) + settings.max_tokens for prompt in prompts)])
