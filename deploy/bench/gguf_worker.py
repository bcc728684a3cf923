"""Rewrites GGUF files in another number format by llama.cpp's own quantize function."""

import ctypes

from deploy.bench.llama_worker import library
from deploy.bench.worker import Actions
from deploy.errors import SetupError


def start() -> Actions:
    """The one action, `rewrite`."""
    llama = library()
    file_types = {"float32": llama.LLAMA_FTYPE_ALL_F32, "float16": llama.LLAMA_FTYPE_MOSTLY_F16}

    def rewrite(source: str, output: str, weight_format: str) -> None:
        parameters = llama.llama_model_quantize_default_params()
        parameters.ftype = file_types[weight_format]
        # From a quantized file too: its values are what the target's weights were made from.
        parameters.allow_requantize = True
        code = llama.llama_model_quantize(source.encode(), output.encode(), ctypes.byref(parameters))
        if code != 0:
            raise SetupError(f"llama.cpp could not rewrite {source} as {weight_format} (code {code})")

    return {"rewrite": rewrite}
