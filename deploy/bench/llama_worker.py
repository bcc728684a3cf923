"""llama.cpp through `llama-cpp-python`, by its C functions: what its own loop would do, and nothing slower.

Its settings are its defaults (a float16 cache among them), but for the number of threads.
"""

import ctypes
import time
from typing import Any

import numpy as np

from deploy.bench.worker import Actions
from deploy.errors import SetupError


def library() -> Any:
    """The module `llama_cpp`, silenced: an optional extra, and `gguf_files` says so where it is absent."""
    import llama_cpp

    llama_cpp.llama_log_set(_silent(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def start(path: str, weight_format: str, num_threads: int, context_length: int) -> Actions:
    """Loads a GGUF file; the actions are `describe`, `generate` and `prefill`.

    Args:
        path: The file.
        weight_format: What it is called in reports.
        num_threads: Threads to compute with.
        context_length: Longest context that will be needed.

    Raises:
        SetupError: The library cannot load the file.
    """
    llama = library()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    if not model:
        raise SetupError(f"llama.cpp cannot load {path}")
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = context_length
    parameters.n_threads = parameters.n_threads_batch = num_threads
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise SetupError(f"llama.cpp cannot make a context of {context_length} tokens for {path}")
    num_logits = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    memory = llama.llama_get_memory(context)
    max_batch = llama.llama_n_batch(context)

    def feed(token_ids: list[int]) -> int:
        """Computes tokens behind the context and returns the likeliest next one."""
        for first in range(0, len(token_ids), max_batch):
            piece = token_ids[first : first + max_batch]
            tokens = (llama.llama_token * len(piece))(*piece)
            code = llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(piece)))
            if code != 0:
                raise SetupError(f"llama_decode failed with code {code}")
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), shape=(num_logits,))
        return int(logits.argmax())

    def describe() -> dict[str, Any]:
        return {
            "weight_format": weight_format,
            "weight_bytes": llama.llama_model_size(model),
            "num_weights": llama.llama_model_n_params(model),
            "software": f"llama-cpp-python {llama.__version__}",
        }

    def generate(prompt: list[int], max_tokens: int, eos_token_ids: list[int]) -> dict[str, Any]:
        llama.llama_memory_clear(memory, False)
        begin = time.perf_counter()
        token_ids = [feed(prompt)]
        first = time.perf_counter()
        while len(token_ids) < max_tokens and token_ids[-1] not in eos_token_ids:
            token_ids.append(feed(token_ids[-1:]))
        end = time.perf_counter()
        return {"token_ids": token_ids, "seconds": end - begin, "first_token_s": first - begin}

    def prefill(prompt: list[int]) -> float:
        llama.llama_memory_clear(memory, False)
        begin = time.perf_counter()
        feed(prompt)
        return time.perf_counter() - begin

    return {"describe": describe, "generate": generate, "prefill": prefill}


_callbacks: list[Any] = []


def _silent(llama: Any) -> Any:
    @llama.llama_log_callback  # type: ignore[untyped-decorator]
    def ignore(level: int, text: bytes, data: Any) -> None:
        pass

    # The library keeps a bare pointer to it.
    _callbacks.append(ignore)
    return ignore
