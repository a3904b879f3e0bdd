"""run.json: what makes a place a store. place.json: where that store is at home.

A copy of a store carries the run of the original and its home too, so it can be told: it may be read, and it
is refused to writers until somebody says what it is, for two lines that go on from one run under the same
numbers would be mistaken for each other.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from weightline.core.ledger import FORMAT
from weightline.core.seal import seal, unseal
from weightline.errors import (
    ConflictError,
    FormatError,
    IntegrityError,
    InvalidInput,
    StoreNotFound,
    Unavailable,
)
from weightline.store.place import Missing, Place

logger = logging.getLogger(__name__)

RUN = "run.json"
HOME = "place.json"
_HINT = "restore it from a copy"


class Run(Struct, frozen=True):
    """One training run and its store."""

    format: int
    run: str
    created_at: float
    forked_from: str | None = None
    """The run that this store was copied from, with all versions up to then."""


class Home(Struct, frozen=True):
    """Where a store was when it was made or last adopted."""

    run: str
    place: str
    """A folder: the file number of its run.json, which a copy does not keep. Anything else: its URL."""


class _Format(Struct):
    format: int


def read_run(place: Place) -> Run:
    """Raises `StoreNotFound`, `FormatError` (damaged, or another format), `Unavailable`."""
    where = f"{place.url}/{RUN}"
    try:
        data = place.read(RUN)
    except Missing:
        raise StoreNotFound(
            f"there is no store at {place.url}",
            hint="check the path, or create one with `weightline serve` or commit",
        ) from None
    try:
        found = msgspec.json.decode(data, type=_Format).format
    except msgspec.DecodeError as error:
        raise FormatError(f"{where} is not that of a store: {error}", hint=_HINT) from None
    if found != FORMAT:
        hint = "open it with the version of weightline that wrote it, or upgrade"
        if found == 0:
            hint = (
                "format 0 was never released; commit the weights anew: `weightline checkout` of the old build"
            )
        raise FormatError(f"{where} has format {found}; this build reads format {FORMAT}", hint=hint)
    try:
        return msgspec.json.decode(unseal(data, where=where, hint=_HINT), type=Run)
    except msgspec.DecodeError as error:
        raise FormatError(f"{where} is not that of a store: {error}", hint=_HINT) from None


def make_run(place: Place, clock: Callable[[], float]) -> Run:
    """The store at `place`, made if need be. Two processes that make it at once end up with the same one."""
    if place.size(RUN) is None:
        if next(iter(place.list("log")), None) is not None:
            raise IntegrityError(
                f"{place.url} has a log and no {RUN}: which run this is cannot be told",
                hint=f"restore {RUN} from a copy; a new run needs an empty place",
            )
        run = Run(FORMAT, uuid.uuid4().hex[:12], clock())
        # A lost answer is cleared up by reading: whoever was first, that is the run.
        place.put_if_absent(RUN, encode(run))
        made = read_run(place)
        settle(place, made.run)
        return made
    return read_run(place)


def encode(record: Run | Home) -> bytes:
    """The record as it lies in the store."""
    return seal(msgspec.json.encode(record)) + b"\n"


def fingerprint(place: Place) -> str:
    """What tells this place from a copy of it."""
    folder = Path(place.url)
    try:
        return f"file {os.stat(folder / RUN).st_ino}"  # noqa: PTH116  nothing but the number is wanted
    except OSError:
        return place.url


def home(place: Place) -> Home | None:
    """None when nothing (readable) is said. Raises `FormatError` for a damaged one."""
    where = f"{place.url}/{HOME}"
    try:
        return msgspec.json.decode(unseal(place.read(HOME), where=where, hint=_HINT), type=Home)
    except Missing:
        return None
    except msgspec.DecodeError as error:
        raise FormatError(f"{where} is not what it should be: {error}", hint=_HINT) from None


def settle(place: Place, run: str) -> None:
    """Say that the store is at home here."""
    place.put(HOME, encode(Home(run, fingerprint(place))))


def is_copy(place: Place, run: str) -> bool:
    """Was the store that is here made somewhere else?"""
    try:
        known = home(place)
    except (FormatError, Unavailable) as error:
        logger.warning("cannot tell whether %s is a copy: %s", place.url, error)
        return False
    return known is not None and (known.run != run or known.place != fingerprint(place))


def refuse_copy(place: Place, run: str) -> None:
    """Raises `ConflictError` for a copy."""
    if is_copy(place, run):
        raise ConflictError(
            f"{place.url} is a copy of run {run}, whose store was made elsewhere: versions written to both "
            "would be mistaken for each other",
            hint="if the original is gone, `weightline adopt STORE` goes on with the run; if both live on, "
            "`weightline adopt STORE --fork` gives this one a run of its own. Reading needs neither",
        )


def adopt_copy(place: Place, clock: Callable[[], float], *, fork: bool) -> Run:
    """Make a copy at home where it is. See `Store.adopt_copy`."""
    run = read_run(place)
    if fork:
        if not is_copy(place, run.run):
            raise InvalidInput(f"{place.url} is no copy", hint="make a new store for a new run")
        run = Run(FORMAT, uuid.uuid4().hex[:12], clock(), run.run)
        place.put(RUN, encode(run))
    settle(place, run.run)
    return run
