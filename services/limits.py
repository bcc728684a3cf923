"""What a peer may ask of a stage. What is beyond is a fault of the peer's, and is refused by name."""

import math
from collections.abc import Iterator

from stagespec.rpc import FieldViolation, invalid_argument
from stagespec.v1.observation_pb2 import ElementType, ObservationRequest
from stagespec.v1.sampling_pb2 import SamplingParams

MAX_LOGPROBS = 20
MAX_CANDIDATES = 64
MAX_TENANT_BYTES = 128


def check_tenant(tenant: str) -> None:
    """Refuses a name that is too long to be kept.

    Raises:
        RpcError: INVALID_ARGUMENT naming the field.
    """
    size = len(tenant.encode())
    if size > MAX_TENANT_BYTES:
        text = f"it has {size} bytes and may have {MAX_TENANT_BYTES}; send a hash of it"
        raise invalid_argument([FieldViolation("tenant", text)])


def check_sampling(sampling: SamplingParams) -> Iterator[FieldViolation]:
    """Finds values that no distribution can come of."""
    ranges = {
        "temperature": (0.0 <= sampling.temperature < math.inf, "[0, inf)"),
        "top_k": (not sampling.HasField("top_k") or sampling.top_k >= 1, "[1, inf)"),
        "top_p": (not sampling.HasField("top_p") or 0.0 < sampling.top_p <= 1.0, "(0, 1]"),
        "min_p": (not sampling.HasField("min_p") or 0.0 <= sampling.min_p <= 1.0, "[0, 1]"),
        "repetition_penalty": (
            not sampling.HasField("repetition_penalty") or 0.0 < sampling.repetition_penalty < math.inf,
            "(0, inf)",
        ),
        "frequency_penalty": (math.isfinite(sampling.frequency_penalty), "(-inf, inf)"),
        "presence_penalty": (math.isfinite(sampling.presence_penalty), "(-inf, inf)"),
    }
    for name, (is_legal, allowed) in ranges.items():
        if not is_legal:
            yield FieldViolation(f"sampling.{name}", f"{getattr(sampling, name)} is not in {allowed}")
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            yield FieldViolation(f"sampling.logit_bias[{token_id}]", f"{bias} is not in (-inf, inf)")


def check_observations(wanted: ObservationRequest) -> Iterator[FieldViolation]:
    """Finds observations that cannot be made."""
    if wanted.hidden_states not in ElementType.values():
        text = f"{wanted.hidden_states} is no element type"
        yield FieldViolation("observations.hidden_states", text)
    if not 0 <= wanted.num_candidates <= MAX_CANDIDATES:
        text = f"{wanted.num_candidates} is not in [0, {MAX_CANDIDATES}]"
        yield FieldViolation("observations.num_candidates", text)
