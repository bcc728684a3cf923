"""Continues many prompts at once with a loaded model: what drafters are trained and counted on.

Each continuation depends on its own prompt, parameters and seed alone, so work that was cut short can go on
anywhere. It does not know what the results are for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.causal_lm.forward import Output, Segment
from services.causal_lm.load import LoadedModel
from services.causal_lm.rows import Rows
from services.sampling import History, draw
from stagespec.v1.sampling_pb2 import SamplingParams

NUM_KEPT = 32
"""Logits that are kept of a position, the largest."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """One prompt to continue.

    Attributes:
        key: The caller's number for it.
        token_ids: At least one.
        sampling: How tokens are drawn. `prompt_length` is filled in.
    """

    key: int
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what the model wrote. The last token was drawn and not run.

    Attributes:
        key: The prompt's number.
        token_ids: Prompt and continuation. [length]
        prompt_length: How many are the prompt's.
        hidden_states: After the final normalisation, of all tokens but the last. [length - 1, hidden]
        top_ids: Likeliest tokens at each drawn position. [length - prompt_length, NUM_KEPT]
        top_logits: Their raw logits. [length - prompt_length, NUM_KEPT]
        totals: Logarithm of the sum of exponentials over the whole vocabulary. [length - prompt_length]
    """

    key: int
    token_ids: tuple[int, ...]
    prompt_length: int
    hidden_states: Tensor
    top_ids: Tensor
    top_logits: Tensor
    totals: Tensor


@dataclass(slots=True)
class _Running:
    """One continuation on its way."""

    prompt: Prompted
    token_ids: list[int]
    rows: Rows
    hidden: list[Tensor] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def finished(self) -> Continuation:
        ids, logits, totals = (torch.stack(column) for column in zip(*self.top, strict=True))
        length = len(self.prompt.token_ids)
        return Continuation(
            self.prompt.key, tuple(self.token_ids), length, torch.cat(self.hidden), ids, logits, totals
        )


@torch.inference_mode()
def continuations(
    loaded: LoadedModel, prompts: Iterable[Prompted], *, batch_size: int, max_tokens: int
) -> Iterator[Continuation]:
    """Continues prompts until an end-of-sequence token, `max_tokens`, or the longest context.

    Args:
        loaded: The model.
        prompts: Taken up one by one as places become free; those that fill the context are left out.
        batch_size: How many run at once.
        max_tokens: Most tokens to draw for each.

    Yields:
        One continuation a prompt, as they are finished.
    """
    ends = set(loaded.info.eos_token_ids)
    longest = loaded.info.max_context_length
    waiting = iter(prompts)
    running: list[_Running] = []
    more = True
    while True:
        while more and len(running) < batch_size:
            prompt = next(waiting, None)
            if prompt is None:
                more = False
            elif 0 < len(prompt.token_ids) < longest:
                running.append(_Running(prompt, list(prompt.token_ids), loaded.new_rows()))
        if not running:
            return
        segments = []
        for each in running:
            num_new = len(each.token_ids) - len(each.rows)
            each.rows.extend(each.token_ids[len(each.rows) :])
            segments.append(Segment(each.rows, num_new, [num_new - 1]))
        _draw_next(running, loaded.forward(segments), loaded.info.vocabulary_size)
        still = []
        for each in running:
            num_drawn = len(each.token_ids) - len(each.prompt.token_ids)
            if each.token_ids[-1] in ends or num_drawn >= max_tokens or len(each.token_ids) >= longest:
                yield each.finished()
            else:
                still.append(each)
        running = still


def _draw_next(running: list[_Running], outputs: list[Output], vocabulary_size: int) -> None:
    """Appends one token to each."""
    logits = torch.cat([output.logits for output in outputs])[:, :vocabulary_size].cpu()
    totals = torch.logsumexp(logits, dim=-1)
    most = max(NUM_KEPT, *(each.prompt.sampling.top_k for each in running))
    top_logits, top_ids = logits.topk(min(most, vocabulary_size))
    everything = np.arange(vocabulary_size)
    for place, (each, output) in enumerate(zip(running, outputs, strict=True)):
        # Copies: a view would keep the whole pass in memory.
        each.hidden.append(output.hidden_states.half().cpu())
        ids, values = top_ids[place], top_logits[place]
        each.top.append((ids[:NUM_KEPT].int(), values[:NUM_KEPT].clone(), totals[place].clone()))
        sampling = SamplingParams()
        sampling.CopyFrom(each.prompt.sampling)
        sampling.prompt_length = len(each.prompt.token_ids)
        history = History(sampling, each.token_ids)
        if sampling.temperature == 0.0 or sampling.HasField("top_k"):
            rising = torch.argsort(ids)
            known, scores = ids[rising].numpy(), values[rising].numpy()
        else:
            known, scores = everything, logits[place].numpy()
        each.token_ids.append(draw(known, scores, sampling, history, len(each.token_ids)))
