"""Arguments and options that several commands share, and how a STORE argument becomes a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weightline.service import Line
    from weightline.store import Store

STORE_HELP = (
    "A store: its folder or a URL (unix:///…/wl.sock, file:///…, s3://…, mirror:/…,/…). "
    "WEIGHTLINE_STORE is the default."
)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help=STORE_HELP, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", metavar="KIND=URL", help="The live engine, e.g. embedded=http://127.0.0.1:8001."
    ),
]


@contextmanager
def opened(store: str, *, create: bool = False) -> Iterator[Line]:
    """The line behind a STORE argument, closed at the end. Raises `StoreNotFound` unless `create`."""
    from weightline.service import CheckpointEngine, connect
    from weightline.service.address import parse

    served = parse(store).scheme in ("unix", "grpc")
    line: Line = CheckpointEngine(store) if create and not served else connect(store)
    try:
        yield line
    finally:
        line.close()


def exists(store: str) -> bool:
    """Is there a store at STORE already? A server's address counts as one."""
    from weightline.errors import StoreNotFound
    from weightline.service.address import parse
    from weightline.store import Store

    address = parse(store)
    if address.scheme not in ("file", "store"):
        return True
    try:
        Store.open(address.url or address.path).close()
    except StoreNotFound:
        return False
    return True


@contextmanager
def opened_store(store: str) -> Iterator[Store]:
    """The store behind a STORE argument, served or not, closed at the end. Raises `StoreNotFound`."""
    from weightline.service.address import parse, store_of
    from weightline.store import Store

    if parse(store).scheme in ("file", "store"):
        found = Store.open(store_of(store))
    else:
        with opened(store) as line:
            found = Store.open(line.address)
    try:
        yield found
    finally:
        found.close()


def parse_pairs(pairs: list[str], option: str) -> dict[str, str]:
    """`["a=1", "b=2"]` as a dict; anything without `=` is refused by naming the option."""
    from weightline.errors import InvalidInput

    result: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidInput(
                f"{option} {pair!r} is not of the form NAME=VALUE",
                hint=f"for example {option} trainer=state.bin",
            )
        if key in result:
            raise InvalidInput(f"{option} names {key!r} twice", hint="give each name once")
        result[key] = value
    return result
