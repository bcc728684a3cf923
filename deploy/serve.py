"""The composition root: stages, the orchestrator in front of them, and everything down again in order."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.config import Config, require_files
from deploy.errors import SetupError
from deploy.launch import new_launcher
from orchestrator.server import OrchestratorServer
from orchestrator.stage import StageAddress
from orchestrator.text import TextCodec
from stagespec.rpc import RpcError


def _silent(_: str) -> None:
    pass


@asynccontextmanager
async def running(config: Config, report: Callable[[str], None] = _silent) -> AsyncIterator[str]:
    """Runs a whole deployment for as long as the context lasts.

    A first cancellation drains; another one while draining ends everything at once.

    Args:
        config: What to run.
        report: Told how starting goes, a line at a time.

    Yields:
        Where the public API is served.

    Raises:
        SetupError: Files are missing, the address is taken, or a stage does not start or does not fit.
    """
    require_files(config)
    _require_free(config.listen)
    begun = time.monotonic()
    codec = _load_codec(config)
    launcher = new_launcher(config)
    server: OrchestratorServer | None = None
    served = asyncio.Event()

    async def moved(name: str, old_address: str, address: str) -> None:
        await served.wait()
        assert server is not None
        in_use = await server.pipeline.relocate(name, old_address, address)
        left = "" if in_use else "; the pipeline no longer uses it"
        report(f"stage {name} is back and listens on {address}{left}")

    names = ", ".join(config.stages)
    how = "under Ray" if config.launcher == "ray" else "as processes"
    report(f"starting {names} {how} ...")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.push_async_callback(launcher.stop, config.supervision.drain_s)
        addresses = await launcher.start(config.stages, moved)
        target, _ = config.target
        server = OrchestratorServer(
            config.orchestrator,
            codec,
            StageAddress(target, addresses[target]),
            [StageAddress(name, addresses[name]) for name in config.drafters],
        )
        try:
            bound = await server.start(config.listen)
        except (OSError, RpcError) as error:
            raise SetupError(error.message if isinstance(error, RpcError) else str(error)) from error
        cleanup.push_async_callback(server.stop, config.supervision.drain_s)
        served.set()
        report(f"ready after {time.monotonic() - begun:.1f} s")
        yield bound


def _load_codec(config: Config) -> TextCodec:
    """Tokenizer and chat template of the target, or of the folder that the configuration names."""
    source = config.tokenizer or config.target[1].settings.model
    try:
        return TextCodec.load(_text_folder(source))
    except ValueError as error:
        raise SetupError(f"tokenizer: {error}") from error


def _text_folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=["tokenizer*", "chat_template*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        text = f"{source!r} is no folder here, and the hub does not give its tokenizer"
        raise ValueError(f"{text} ({type(error).__name__})") from error


def _require_free(listen: str) -> None:
    """Raises SetupError if a port is taken, which would otherwise be found only after models have loaded."""
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:") or port == "0":
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise SetupError(f"listen: cannot listen on {listen}: {error.strerror or error}") from error
