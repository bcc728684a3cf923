"""How the processes talk: channel and server options, and errors with google.rpc details.

Every status that leaves a server carries an `ErrorInfo` with a reason, so that a client need not read text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "stagespec"
PROTOCOL_VERSION = 1
STAGE_MESSAGE_BYTES = 16 * 1024 * 1024
PUBLIC_MESSAGE_BYTES = 4 * 1024 * 1024

Options = list[tuple[str, int]]


def _keepalive() -> Options:
    # grpc.http2.ping_timeout_ms is what bounds a dead peer; keepalive_timeout_ms alone does not (its default
    # leaves a stopped peer undetected for a minute).
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(max_message_bytes: int) -> Options:
    """Options of every server. A second server on the same port fails instead of sharing it silently."""
    return [
        *_keepalive(),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", STAGE_MESSAGE_BYTES),
    ]


def channel_options() -> Options:
    """Options of every channel: quick reconnection, since stages restart within a second."""
    return [
        *_keepalive(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.max_receive_message_length", STAGE_MESSAGE_BYTES),
        ("grpc.max_send_message_length", STAGE_MESSAGE_BYTES),
    ]


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request and what is wrong with it: the value, the limit, what to do."""

    field: str
    description: str


@dataclass(eq=False)
class RpcError(Exception):
    """A refusal that the peer may read: its text is written for them and holds nothing internal.

    Attributes:
        code: Canonical status code.
        reason: Constant in UPPER_SNAKE_CASE that programs can match on.
        message: One sentence for a person.
        violations: The fields at fault, for INVALID_ARGUMENT.
        retry_after: Seconds after which trying again makes sense; None if it does not.
        metadata: Values that programs may need beside the text.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    violations: Sequence[FieldViolation] = ()
    retry_after: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code.name} ({self.reason}): {self.message}"


def invalid_argument(violations: Sequence[FieldViolation]) -> RpcError:
    """INVALID_ARGUMENT naming every field at fault."""
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, violations)


async def abort(context: grpc.aio.ServicerContext, error: RpcError) -> NoReturn:  # type: ignore[type-arg]
    """Ends a call with `error` as its status and google.rpc details."""
    details = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=dict(error.metadata))
    ]
    packed = []
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad_request.field_violations.add(field=violation.field, description=violation.description)
        packed.append(_pack(bad_request))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.code.name),
        message=error.message,
        details=[_pack(details[0]), *packed],
    )
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort returned")


def describe(error: grpc.aio.AioRpcError) -> RpcError:
    """Reads a status back into an `RpcError`: the client's side of `abort`.

    `reason` is the code's name when the peer sent no details.
    """
    reason, violations, retry_after = error.code().name, [], None
    metadata: dict[str, str] = {}
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
        except DecodeError:
            continue
        for detail in status.details:
            info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Unpack(bad_request):
                violations = [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
            elif detail.Unpack(retry):
                retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return RpcError(error.code(), reason, error.details() or "", violations, retry_after, metadata)


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed


def seconds(duration: duration_pb2.Duration) -> float:
    """A Duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def to_duration(value: float) -> duration_pb2.Duration:
    """Seconds as a Duration."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration
