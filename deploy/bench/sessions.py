"""Throughput of several sessions at once through a running server."""

import asyncio
from collections.abc import Sequence

from deploy.bench.served import OwnRunner


async def measure_sessions(
    runner: OwnRunner, prompts: Sequence[Sequence[int]], sampling: str, num_tokens: int
) -> dict[str, float | None]:
    """Throughput of several sessions at once, each going on to `num_tokens` whatever it draws.

    Returns:
        `tokens_per_s` of all together from the first request to the last token, and `steady_tokens_per_s`
        while all were decoding: None if there was no such time.
    """
    streams = await asyncio.gather(
        *(runner.stream(prompt, sampling, num_tokens, ignore_eos=True) for prompt in prompts)
    )
    begin, end = min(stream.begin for stream in streams), max(stream.end for stream in streams)
    total = sum(len(stream.token_ids) for stream in streams)
    arrivals = [stream.arrivals for stream in streams]
    return {"tokens_per_s": total / (end - begin), "steady_tokens_per_s": steady_rate(arrivals)}


def steady_rate(arrivals: Sequence[Sequence[tuple[float, int]]]) -> float | None:
    """Tokens a second after every stream had its first tokens and before any had its last ones.

    Args:
        arrivals: For each stream, moments and how many tokens came then.
    """
    begin = max(stream[0][0] for stream in arrivals)
    end = min(stream[-1][0] for stream in arrivals)
    if end <= begin:
        return None
    count = sum(number for stream in arrivals for moment, number in stream if begin < moment <= end)
    return count / (end - begin)
