"""run.json: what makes a folder a store."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from weightline.core.ledger import FORMAT
from weightline.errors import FormatError, InvalidInput, StoreNotFound
from weightline.store.disk import Disk, typed
from weightline.store.staging import VERSIONS

RUN = "run.json"
_FOLDERS = ("log", VERSIONS, "leases", "pins")


class Run(Struct, frozen=True):
    """One training run and its store."""

    format: int
    run: str
    created_at: float


def read_run(root: Path) -> Run:
    """Raises `StoreNotFound`, `FormatError`, `InvalidInput`."""
    path = root / RUN
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFound(
            f"there is no store at {root}",
            hint="check the path, or create one with `weightline serve` or commit",
        ) from None
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint="check its permissions") from error
    try:
        run = msgspec.json.decode(data, type=Run)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path} is not that of a store: {error}", hint="restore it from a copy") from None
    if run.format != FORMAT:
        raise FormatError(
            f"{path} has format {run.format}; this build reads format {FORMAT}",
            hint="open it with the version of weightline that wrote it, or upgrade",
        )
    return run


def make_run(root: Path, disk: Disk, clock: Callable[[], float]) -> Run:
    """The store at `root`, made if need be. Two processes that make it at once end up with the same one."""
    if root.exists() and not root.is_dir():
        raise InvalidInput(f"{root} is not a folder", hint="give a folder for the store")
    with typed(str(root)):
        root.mkdir(parents=True, exist_ok=True)
        if not (root / RUN).exists():
            for name in _FOLDERS:
                (root / name).mkdir(exist_ok=True)
            run = Run(FORMAT, uuid.uuid4().hex[:12], clock())
            disk.put_if_absent(root / RUN, msgspec.json.encode(run))
    return read_run(root)
