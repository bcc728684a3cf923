"""`transformers` as a person runs it: `generate` with its defaults, in float32, greedily."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from deploy.bench.worker import Actions
from deploy.model_libraries import quiet


class _Clock(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Notes when the first token comes; the prompt is streamed before it."""

    def __init__(self) -> None:
        self._is_first = True
        self.moment: float | None = None

    def put(self, value: Any) -> None:
        if self._is_first:
            self._is_first = False
        elif self.moment is None:
            self.moment = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def start(model: str, device: str, num_threads: int) -> Actions:
    """Loads the model; the actions are `describe`, `generate` and `prefill`."""
    torch.set_num_threads(num_threads)
    quiet()
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval().to(device)

    def describe() -> dict[str, Any]:
        sizes = {id(parameter): parameter.numel() for parameter in loaded.parameters()}
        table, head = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
        num_weights = sum(sizes.values()) - (0 if table is head else table.numel())
        return {
            "weight_format": "float32",
            "weight_bytes": 4 * num_weights,
            "num_weights": num_weights,
            "software": f"transformers {transformers.__version__}",
        }

    def generate(prompt: list[int], max_tokens: int, eos_token_ids: list[int]) -> dict[str, Any]:
        clock = _Clock()
        inputs = torch.tensor([prompt], device=device)
        begin = time.perf_counter()
        output = loaded.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,
            streamer=clock,
        )
        token_ids = output[0, len(prompt) :].tolist()
        end = time.perf_counter()
        assert clock.moment is not None
        return {"token_ids": token_ids, "seconds": end - begin, "first_token_s": clock.moment - begin}

    @torch.inference_mode()
    def prefill(prompt: list[int]) -> float:
        inputs = torch.tensor([prompt], device=device)
        begin = time.perf_counter()
        # As generate does it: a cache is filled, and only the last position goes through the head.
        int(loaded(input_ids=inputs, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - begin

    return {"describe": describe, "generate": generate, "prefill": prefill}
