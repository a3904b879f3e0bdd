"""`serve_engine`: one engine process, from a model folder to a port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightline.errors import InvalidInput, Unavailable
from weightline.generate.options import EngineOptions

if TYPE_CHECKING:
    from weightline.generate.engine import Engine


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `Unavailable` for a port in use, `InvalidInput` for an address that is
    none; nothing is loaded before it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error}", hint="give an address of this machine"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}",
            hint="stop what uses it, or give another --port",
        ) from error
    return listener


def serve_engine(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int,
    dtype: str = "auto",
    max_num_seqs: int = 16,
    max_model_len: int = 2048,
    kv_tokens: int | None = None,
    prefix_tokens: int = 4096,
    session_timeout: float = 30.0,
    threads: int | None = None,
    served_model_name: str | None = None,
    ready: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Run the rollout engine until SIGINT or SIGTERM. `port` 0 takes a free one; `threads` None leaves the
    choice to torch, the limits are those of `EngineOptions`. With `served_model_name` the API knows the
    model by that name only.

    `ready` is called once it answers, with `url`, `port`, `pid`, `instance`, `model` and `load_s`. Raises
    `InvalidInput` (model folder, dtype, limits), `FormatError` (damaged weights) and `Unavailable` (port in
    use).
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    options = EngineOptions(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        prefix_tokens=prefix_tokens,
        session_timeout=session_timeout,
    )
    listener = bind(host, port)
    try:
        _serve(listener, host, Path(model), dtype, options, threads, served_model_name, ready)
    finally:
        listener.close()


def _serve(
    listener: socket.socket,
    host: str,
    folder: Path,
    dtype: str,
    options: EngineOptions,
    threads: int | None,
    served_model_name: str | None,
    ready: Callable[[dict[str, Any]], None] | None,
) -> None:
    started = time.monotonic()
    import torch

    from weightline import codec
    from weightline.generate.app import build_app
    from weightline.generate.engine import Engine
    from weightline.generate.model import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    # Compiled before the engine reports ready: a compilation inside a pause would be the longest pause of
    # the run.
    codec.warm()
    engine = Engine(load_model(folder, dtype=dtype, max_model_len=options.max_model_len), options)
    taken = listener.getsockname()[1]
    facts = {
        "url": f"http://{f'[{host}]' if ':' in host else host}:{taken}",
        "port": taken,
        "pid": os.getpid(),
        "instance": engine.instance,
        "model": str(folder),
        "load_s": round(time.monotonic() - started, 3),
    }

    app = build_app(engine, served_model_name=served_model_name)
    with engine:
        asyncio.run(_listen(app, engine, listener, facts, ready))


async def _listen(
    app: Any,
    engine: Engine,
    listener: socket.socket,
    facts: dict[str, Any],
    ready: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Serve until a signal. Then running requests end with what they have, their answers go out, and it
    returns.
    """
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are ours: uvicorn would raise them again after its shutdown, and so end the process
            by signal.
            """
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if ready is not None and not self.should_exit:
                ready(facts)

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    server = Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        loop.run_in_executor(None, engine.stop)

    with suppress(ValueError, RuntimeError):  # not the main thread: whoever runs it there stops it otherwise
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
