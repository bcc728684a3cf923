"""The interceptor of every server: what reaches a client is a status with a reason, never exception text.

It also reads messages itself, because a malformed one would otherwise end as UNKNOWN with a stack of
internals in its text.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from stagespec.rpc import RpcError, abort

_log = logging.getLogger(__name__)

_MALFORMED = RpcError(
    grpc.StatusCode.INVALID_ARGUMENT,
    "MALFORMED_MESSAGE",
    "the message is not a valid protobuf of this method",
)
_INTERNAL = RpcError(
    grpc.StatusCode.INTERNAL, "INTERNAL", "the server failed to handle this call; its log says why"
)

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:  # a generic in its stubs only
    Handler = grpc.RpcMethodHandler[Any, Any]


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Turns malformed messages, refusals (`RpcError`) and unexpected exceptions into clean statuses."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wraps the method's handler; unknown methods pass through to gRPC's own answer."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        deserialize = handler.request_deserializer or (lambda data: data)
        method = handler_call_details.method

        def wrap_stream(behavior: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                try:
                    responses: Any = behavior(_read(request, deserialize), context)
                    if inspect.isawaitable(responses):  # a handler that writes to the context itself
                        await responses
                        return
                    # Closed here, so that a cancelled call cleans up at once and not when it is collected.
                    async with aclosing(responses):
                        async for response in responses:
                            yield response
                except Exception as error:
                    await _end(context, method, error)

            return stream

        def wrap_unary(behavior: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def unary(request: Any, context: Context) -> Any:
                try:
                    return await behavior(_read(request, deserialize), context)
                except Exception as error:
                    await _end(context, method, error)

            return unary

        kinds: dict[tuple[bool, bool], tuple[Any, Any, Any]] = {
            (False, False): (handler.unary_unary, wrap_unary, grpc.unary_unary_rpc_method_handler),
            (False, True): (handler.unary_stream, wrap_stream, grpc.unary_stream_rpc_method_handler),
            (True, False): (handler.stream_unary, wrap_unary, grpc.stream_unary_rpc_method_handler),
            (True, True): (handler.stream_stream, wrap_stream, grpc.stream_stream_rpc_method_handler),
        }
        behavior, wrap, make = kinds[handler.request_streaming, handler.response_streaming]
        wrapped: Handler = make(
            wrap(behavior), request_deserializer=None, response_serializer=handler.response_serializer
        )
        return wrapped


def _read(request: Any, deserialize: Callable[[bytes], Any]) -> Any:
    if isinstance(request, bytes):
        return _decode(request, deserialize)
    return _read_stream(request, deserialize)


async def _read_stream(
    requests: AsyncIterator[bytes], deserialize: Callable[[bytes], Any]
) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decode(request, deserialize)


def _decode(data: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    try:
        return deserialize(data)
    except DecodeError as error:
        raise _MALFORMED from error


async def _end(context: Context, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, asyncio.CancelledError):
        raise error
    if not isinstance(error, RpcError):
        _log.error("%s failed", method, exc_info=error)
        error = _INTERNAL
    await abort(context, error)
