"""The client's end of the socket: one channel, typed calls, transport failures as `Unavailable`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from msgspec import Struct

from weightline.errors import FormatError, InvalidInput, Unavailable, WeightlineError
from weightline.service.address import Address
from weightline.service.wire import MAX_REPLY_BYTES, METHODS, pack, path_of, unpack, unpack_reply

_T = TypeVar("_T", bound=Struct)

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.enable_retries", 0),
    # Each client its own connection: one that is closed, or backs off, does not touch another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
]


def load_grpc() -> Any:
    """The grpc module, imported late, with its fork handlers off unless the process chose otherwise.

    They print a warning at every `fork` of a process that has a channel (a trainer's data loader workers),
    and would only matter to a child that goes on using the parent's channel: `Rpc` refuses that by itself.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return importlib.import_module("grpc")


class Rpc:
    """Thread-safe calls to one server."""

    def __init__(self, address: Address) -> None:
        grpc = load_grpc()
        self._grpc = grpc
        self._address = address
        self._pid = os.getpid()
        self._closed = False
        self._channel = grpc.insecure_channel(address.target, options=CHANNEL_OPTIONS)

    def call(self, method: str, request: Struct, reply: type[_T], *, timeout: float) -> _T:
        """One request, one reply. Raises the server's own error, `Unavailable` when no answer came in
        `timeout` seconds.
        """
        self._usable()
        stub = self._channel.unary_unary(path_of(method), request_serializer=pack, response_deserializer=None)
        try:
            answer = stub(request, timeout=timeout)
        except self._grpc.RpcError as error:
            raise self._translated(method, error) from None
        except ValueError as error:  # the channel was closed by another thread
            raise self._gone(str(error)) from None
        return unpack_reply(answer, reply, what=f"answer of {self._address} to {method}")

    def stream(self, method: str, request: Struct) -> tuple[Any, Iterator[Any]]:
        """The call, to be cancelled, and its messages. Ends with `Unavailable` when the connection does."""
        self._usable()
        stub = self._channel.unary_stream(
            path_of(method), request_serializer=pack, response_deserializer=None
        )
        try:
            call = stub(request)
        except ValueError as error:
            raise self._gone(str(error)) from None
        return call, self._messages(method, call)

    def _messages(self, method: str, call: Any) -> Iterator[Any]:
        try:
            for data in call:
                yield unpack(data, METHODS[method][1], what=f"event of {self._address}")
        except self._grpc.RpcError as error:
            raise self._translated(method, error) from None

    def close(self) -> None:
        """Close the channel; calls that are under way end with `Unavailable`. Idempotent."""
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            self._channel.close()

    def _usable(self) -> None:
        if self._closed:
            raise InvalidInput(f"the connection to {self._address} is closed", hint="connect again")
        if self._pid != os.getpid():
            raise InvalidInput(
                f"the connection to {self._address} belongs to process {self._pid}; this is a fork of it",
                hint="connect in the child, and start it by spawn or forkserver",
            )

    def _gone(self, why: str) -> Unavailable:
        return Unavailable(
            f"{self._address}: {why}", hint="is the server up? start it with: weightline serve STORE"
        )

    def _translated(self, method: str, error: Any) -> WeightlineError:
        code, codes = error.code(), self._grpc.StatusCode
        detail = " ".join(str(error.details()).split())
        if code in (codes.UNAVAILABLE, codes.CANCELLED):
            return self._gone(f"no server answers ({detail})")
        if code is codes.DEADLINE_EXCEEDED:
            return self._gone(f"no answer to {method} in time")
        if code is codes.UNIMPLEMENTED:
            return FormatError(
                f"{self._address} does not know {method}", hint="client and server are of different releases"
            )
        if code is codes.RESOURCE_EXHAUSTED:
            return InvalidInput(f"{method} to {self._address}: {detail}", hint="give less metadata")
        return WeightlineError(
            f"{self._address}: {method} failed: {code.name}: {detail}", hint="see the server's log"
        )
