"""Makes a server listen, and refuses an address that another one has, which gRPC alone would not."""

import socket

import grpc


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Adds an address to a server.

    Args:
        server: Not started yet. If this raises, stop it and drop it outside the exception's handler: gRPC
            cannot clean up a server that a traceback keeps alive.
        listen: "host:port" with port 0 for any free one, or "unix:path".

    Returns:
        The address with the port that was chosen.

    Raises:
        OSError: The address is taken or cannot be used.
    """
    is_path = listen.startswith("unix:")
    try:
        # gRPC would take a living server's socket away without a word.
        port = 0 if is_path and _is_served(listen.removeprefix("unix:")) else server.add_insecure_port(listen)
    except RuntimeError:
        port = 0
    if port == 0:
        raise OSError(
            f"cannot listen on {listen}: it is in use, or is no address of this host"
            " (host:port, or unix:path with at most 107 characters)"
        )
    return listen if is_path else f"{listen.rpartition(':')[0]}:{port}"


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
