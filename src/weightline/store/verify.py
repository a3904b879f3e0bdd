"""Verify: everything in a store that could be wrong, like fsck. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightline.codec import bits_of, digest_of
from weightline.core.ledger import VersionEntry
from weightline.errors import FormatError, IntegrityError, Unavailable, WeightlineError
from weightline.store import manifest as manifests
from weightline.store import staging
from weightline.store.disk import drafts
from weightline.store.manifest import Manifest
from weightline.store.reading import check_blob
from weightline.types import Problem, VerifyReport

if TYPE_CHECKING:
    from weightline.store.store import Store

_RESTORE = "restore the file from a copy"


def verify(store: Store, *, deep: bool) -> VerifyReport:
    """See `Store.verify`. Never raises for what it finds."""
    problems = list(_log(store))
    broken: set[int] = set()
    for entry in store.state.versions():
        if entry.version in store.state.retired:
            continue
        found = list(_version(store, entry, deep, broken))
        if found:
            broken.add(entry.version)
        problems += found
    problems += _leftovers(store)
    return VerifyReport(ok=not problems, versions=len(store.state), problems=tuple(problems))


def _log(store: Store) -> Iterator[Problem]:
    try:
        store.read_log()
    except WeightlineError as error:
        path = str(store.log.path(store.state.seq + 1))
        yield Problem("torn_entry", None, path, f"{error.message}; {_RESTORE}")
        return
    try:
        store.log.check_gap(store.state)
    except WeightlineError as error:
        yield Problem("gap", None, str(store.log.path(store.state.seq + 1)), f"{error.message}; {error.hint}")
    if store.log.hint() > store.state.seq:
        yield Problem(
            "hint", None, str(store.root / "head.json"), "it names an entry that is missing; restore the log"
        )


def _version(store: Store, entry: VersionEntry, deep: bool, broken: set[int]) -> Iterator[Problem]:
    folder = store.root / entry.folder
    if not folder.is_dir():
        yield Problem("missing_folder", entry.version, str(folder), _RESTORE)
        return
    manifest, problem = _manifest(entry, folder)
    if problem is not None:
        yield problem
    if manifest is None:
        return
    whole = True
    for blob in manifest.blobs:
        try:
            check_blob(folder / blob.name, blob, again=deep)
        except (IntegrityError, Unavailable) as error:
            whole = False
            yield Problem("blob", entry.version, str(folder / blob.name), f"{error.message}; {_RESTORE}")
    if entry.base is not None and entry.stored == "delta":
        if entry.base in store.state.retired:
            yield Problem(
                "chain", entry.version, str(folder), f"its base {entry.base} is retired; pin what must stay"
            )
            return
        if entry.base in broken:
            yield Problem(
                "chain", entry.version, str(folder), f"its base {entry.base} is damaged; repair that"
            )
            return
    if whole:
        yield from _content(store, entry, deep)


def _manifest(entry: VersionEntry, folder: Path) -> tuple[Manifest | None, Problem | None]:
    path = folder / manifests.MANIFEST
    try:
        data = path.read_bytes()
        if manifests.digest_of(data) != entry.digest:
            return None, Problem(
                "manifest", entry.version, str(path), f"it differs from its digest in the log; {_RESTORE}"
            )
        return manifests.decode(data, where=str(path)), None
    except OSError as error:
        return None, Problem("manifest", entry.version, str(path), f"{error.strerror}; {_RESTORE}")
    except FormatError as error:
        return None, Problem("manifest", entry.version, str(path), error.message)


def _content(store: Store, entry: VersionEntry, deep: bool) -> Iterator[Problem]:
    """The digests add up; when `deep`, every tensor that is rebuilt has the digest of its manifest."""
    folder = str(store.root / entry.folder)
    try:
        table = store.reading.table(entry.version)
        if not deep:
            return
        wrong = [
            name
            for name, array in store.reading.load(entry.version).items()
            if digest_of(bits_of(array)) != table[name].digest
        ]
    except WeightlineError as error:
        yield Problem("content", entry.version, folder, error.message)
        return
    for name in wrong:
        yield Problem("tensor", entry.version, folder, f"tensor {name!r} differs from its digest")


def _leftovers(store: Store) -> Iterator[Problem]:
    """What is there and nothing names: the folders of dead writers, drafts, retired versions that were not
    deleted.
    """
    named = {entry.folder for entry in store.state.versions()}
    for folder in sorted((store.root / staging.VERSIONS).iterdir()):
        if f"{staging.VERSIONS}/{folder.name}" in named:
            continue
        owner = staging.owner_of(folder)
        if owner is None:
            yield Problem(
                "dangling", None, str(folder), "no entry names it and it has no owner; remove it by hand"
            )
        elif staging.is_dead(owner):
            yield Problem("dangling", None, str(folder), f"left by {owner}; `weightline gc` removes it")
    for draft in drafts(store.log.folder):
        yield Problem(
            "draft", None, str(draft), "left by a crash, or being written now; remove it if it stays"
        )
