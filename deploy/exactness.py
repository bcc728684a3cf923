"""Compares what the pipeline gives in every mode with plain decoding, and plain decoding with transformers.

A difference is reported with its position, both ids and how close the target's choice was there. Below
`TIE_MARGIN` it counts as a tie: rounding decides, and no drafter does.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.client import Client, Generated, Mode, speculation
from deploy.prompts import Prompt
from stagespec.v1.generation_pb2 import GenerateRequest, SamplingOptions, StopOptions
from stagespec.v1.stage_pb2 import StageInfo

TIE_MARGIN = 1e-4
"""In float32, where two ways to sum differ in the last bits."""

TIE_MARGIN_INT8 = 2e-2
"""With 8-bit weights, where the last bit of a sum may decide how the next layer's input is rounded."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode.

    Attributes:
        mode: Which drafters.
        max_nodes: Most nodes in a draft; None for the server's setting.
    """

    mode: Mode
    max_nodes: int | None = None

    @property
    def name(self) -> str:
        """What it is called in reports."""
        return self.mode if self.max_nodes is None else f"{self.mode}, {self.max_nodes} nodes"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an output is not what plain decoding gave.

    Attributes:
        prompt: Index of the prompt.
        variant: Whose output it is.
        position: Index of the token in the output.
        expected: What plain decoding drew; None if it had ended.
        found: What came instead; None if the output had ended.
        margin: How far apart the two are for the target, in the scores that decide; None if only one of them
            can be drawn at all.
        tie_margin: Below this, rounding explains it. In half precision that is so for every margin: there a
            difference is reported and not a fault.
    """

    prompt: int
    variant: str
    position: int
    expected: int | None
    found: int | None
    margin: float | None
    tie_margin: float = TIE_MARGIN

    @property
    def is_tie(self) -> bool:
        """Whether rounding alone explains it."""
        return self.margin is not None and self.margin < self.tie_margin

    def plain(self) -> dict[str, Any]:
        """The difference as plain data, which knows no infinity."""
        return {**asdict(self), "tie_margin": self.tie_margin if math.isfinite(self.tie_margin) else None}


@dataclass(slots=True)
class Tally:
    """What one variant did over all prompts."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_passes: int = 0
    seconds: float = 0.0

    def add(self, generated: Generated, spent: float) -> None:
        """Books one output."""
        stats = generated.completion.speculation
        self.num_tokens += len(generated.token_ids)
        self.num_steps += stats.num_steps
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted
        self.num_passes += sum(drafter.num_passes for drafter in stats.drafters)
        self.seconds += spent


@dataclass(slots=True)
class Report:
    """The outcome of a comparison."""

    num_prompts: int
    tallies: dict[str, Tally] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def mismatches(self) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [difference for difference in self.differences if not difference.is_tie]

    def plain(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "exact": not self.mismatches,
            "num_prompts": self.num_prompts,
            "results": [{"variant": name, **asdict(tally)} for name, tally in self.tallies.items()],
            "mismatches": [difference.plain() for difference in self.mismatches],
            "ties": [difference.plain() for difference in self.differences if difference.is_tie],
        }


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the server gave: token ids by variant and prompt, and the prompts' own."""

    prompts: list[list[int]]
    token_ids: dict[Variant, list[tuple[int, ...]]]
    eos_token_ids: list[int]


async def collect(
    client: Client,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    sampling: SamplingOptions,
    max_tokens: int,
    concurrency: int,
    report: Report,
    progress: Callable[[int, int], None],
) -> Outputs:
    """Runs every prompt through every variant.

    Raises:
        RpcError: The server refused or failed.
        SetupError: No server answers, or it has no drafter for a mode.
    """
    pipeline = await client.get_pipeline()
    outputs = Outputs([[] for _ in prompts], {}, list(pipeline.verifier.info.eos_token_ids))
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def run(index: int, variant: Variant, request: GenerateRequest) -> None:
        nonlocal done
        async with slots:
            begun = time.perf_counter()
            generated = await client.complete(request)
            report.tallies[variant.name].add(generated, time.perf_counter() - begun)
        outputs.token_ids[variant][index] = generated.token_ids
        outputs.prompts[index] = list(generated.completion.prompt_token_ids)
        done += 1
        progress(done, len(prompts) * len(variants))

    jobs = []
    for variant in variants:
        report.tallies[variant.name] = Tally()
        outputs.token_ids[variant] = [()] * len(prompts)
    # Prompt by prompt, so that a run that is cut short has compared something.
    for index, prompt in enumerate(prompts):
        for variant in variants:
            request = prompt.request()
            request.sampling.CopyFrom(sampling)
            request.stop.CopyFrom(StopOptions(max_tokens=max_tokens))
            request.speculation.CopyFrom(speculation(variant.mode, pipeline))
            if variant.max_nodes is not None:
                request.speculation.max_nodes = variant.max_nodes
            request.return_prompt_token_ids = True
            jobs.append(run(index, variant, request))
    await asyncio.gather(*jobs)
    return outputs


def compare(
    outputs: Outputs,
    served: StageInfo,
    sampling: SamplingOptions,
    max_tokens: int,
    report: Report,
    progress: Callable[[int, int], None],
) -> None:
    """Compares every variant with the first one and, at temperature 0, that one with transformers.

    Args:
        outputs: From `collect`; its first variant is plain decoding.
        served: The target's model and number formats; transformers computes with the same numbers.
        sampling: How the outputs were drawn.
        max_tokens: Most tokens in an output.
        report: Gets the differences and, for transformers, a tally.
        progress: Told how many prompts transformers has finished.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from services.causal_lm.formats import as_served

    dtype = getattr(torch, served.dtype or "float32")
    reference = AutoModelForCausalLM.from_pretrained(served.model, dtype=dtype).eval()
    as_served(reference, served.weight_format)
    if served.weight_format == "int8" and served.kernel != "native":
        exact_margin = TIE_MARGIN_INT8  # torch's attention sums a tree in another order than a path
    else:
        exact_margin = TIE_MARGIN if dtype == torch.float32 else math.inf
    transformers_margin = max(exact_margin, TIE_MARGIN_INT8 if served.weight_format == "int8" else 0.0)
    first, *others = outputs.token_ids
    pairs = [(variant.name, outputs.token_ids[variant]) for variant in others]
    if sampling.temperature == 0.0:
        report.tallies["transformers"] = tally = Tally()
        found = []
        for index, prompt in enumerate(outputs.prompts):
            begun = time.perf_counter()
            found.append(_greedy(reference, prompt, max_tokens, outputs.eos_token_ids))
            tally.seconds += time.perf_counter() - begun
            tally.num_tokens += len(found[-1])
            progress(index + 1, len(outputs.prompts))
        pairs.append(("transformers", found))
    for name, sequences in pairs:
        for index, (expected, ids) in enumerate(zip(outputs.token_ids[first], sequences, strict=True)):
            if expected == ids:
                continue
            position = next(
                (i for i, (a, b) in enumerate(zip(expected, ids, strict=False)) if a != b),
                min(len(expected), len(ids)),
            )
            context = [*outputs.prompts[index], *expected[:position]]
            pair = [ids_[position] if position < len(ids_) else None for ids_ in (expected, ids)]
            margin = _margin(reference, context, len(outputs.prompts[index]), sampling, pair)
            tie_margin = transformers_margin if name == "transformers" else exact_margin
            report.differences.append(Difference(index, name, position, pair[0], pair[1], margin, tie_margin))


def _greedy(model: Any, prompt: list[int], max_tokens: int, eos_token_ids: list[int]) -> tuple[int, ...]:
    """What transformers generates on its own."""
    import torch

    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos_token_ids or None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


def _margin(
    model: Any, context: list[int], prompt_length: int, sampling: SamplingOptions, pair: list[int | None]
) -> float | None:
    """How far apart the two tokens are for the target, in the scores whose maximum is drawn."""
    import torch

    if None in pair:
        return None  # one of them ended without a token that ends it
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1].float().numpy()
    scores: npt.NDArray[np.floating[Any]] = logits
    ids = np.arange(len(logits))
    if sampling.temperature > 0.0:
        from services.sampling import History, perturb, process
        from stagespec.v1.sampling_pb2 import SamplingParams

        params = SamplingParams(
            temperature=sampling.temperature, seed=sampling.seed, prompt_length=prompt_length
        )
        for name in ("top_k", "top_p", "min_p"):
            if sampling.HasField(name):
                setattr(params, name, getattr(sampling, name))
        left = perturb(process(ids, logits, params, History(params, context)), params, len(context))
        ids, scores = left.ids, left.scores
    values = [scores[ids == token_id] for token_id in pair]
    if any(len(value) == 0 for value in values):
        return None  # a cut, such as top-k, let only one of them through
    return abs(float(values[0][0]) - float(values[1][0]))
