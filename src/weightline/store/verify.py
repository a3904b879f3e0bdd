"""Verify: everything in a store that could be wrong, like fsck. Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weightline.codec import bits_of, digest_of
from weightline.core.ledger import VersionEntry
from weightline.errors import FormatError, IntegrityError, Unavailable, WeightlineError
from weightline.store import manifest as manifests
from weightline.store.leftovers import leftovers
from weightline.store.log import HEAD
from weightline.store.manifest import Blob, Manifest
from weightline.store.place import Missing
from weightline.store.reading import check_blob
from weightline.store.run import HOME, RUN, home, read_run
from weightline.types import Problem, VerifyReport

if TYPE_CHECKING:
    from weightline.store.store import Store

_RESTORE = "restore the file from a copy"
_MEND = "`weightline verify --repair` puts it back from the index, else restore it from a copy"


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
    found_left = list(leftovers(store))
    problems += [problem for problem, harmless in found_left if not harmless]
    notes = tuple(problem for problem, harmless in found_left if harmless)
    if store.copied:
        hint = "a copy: before it is written to, `weightline adopt` says what it is"
        notes += (Problem("copy", None, store.place.url, hint),)
    return VerifyReport(ok=not problems, versions=len(store.state), problems=tuple(problems), notes=notes)


def _log(store: Store) -> Iterator[Problem]:
    """The entries, one by one: what the index says of them is no proof. Then what else carries truth."""
    yield from _entries(store)
    try:
        store.read_log()
        store.log.check_gap(store.state, thorough=True)
    except FormatError:
        pass  # told by `_entries`
    except WeightlineError as error:
        yield Problem("gap", None, str(store.log.path(store.state.seq + 1)), f"{error.message}; {error.hint}")
    if store.log.hint() > store.state.seq:
        path = f"{store.place.url}/{HEAD}"
        yield Problem("hint", None, path, "it names an entry that is missing; restore the log")
    for check, name in ((read_run, RUN), (home, HOME)):
        try:
            check(store.place)
        except WeightlineError as error:
            yield Problem("run", None, f"{store.place.url}/{name}", f"{error.message}; {error.hint}")
    for key, why in store.leases.damaged():
        yield Problem("lease", None, f"{store.place.url}/{key}", f"{why}; remove it, then pin or lease anew")
    for first, last in store.log.index.present():
        try:
            lines = store.log.index.lines(first, last)
            wrong = last > store.state.seq or len(lines) != last - first + 1
            why = "it does not fit the log"
        except (Missing, FormatError, IntegrityError, Unavailable) as error:
            wrong, why = True, str(error)
        if wrong:
            path = f"{store.place.url}/{store.log.index.key(first, last)}"
            yield Problem("index", None, path, f"{why}; `weightline verify --repair` makes it anew")


def _entries(store: Store) -> Iterator[Problem]:
    numbers = store.log.present()
    costs = "every version from there on cannot be read without it; run `weightline verify --repair`"
    for seq in numbers:
        try:
            store.log.read(seq)
        except FormatError as error:
            hint = f"{error.message}; {costs if seq > store.state.seq else _MEND}"
            yield Problem("torn_entry", _named(store, seq), str(store.log.path(seq)), hint)
        except WeightlineError as error:
            yield Problem("log", None, str(store.log.path(seq)), f"{error.message}; {error.hint}")
    there = set(numbers)
    for seq in range(1, store.state.seq + 1):
        if seq not in there:
            path = str(store.log.path(seq))
            yield Problem("gap", _named(store, seq), path, f"log entry {seq} is missing; {_MEND}")


def _named(store: Store, seq: int) -> int | None:
    """The version that entry `seq` made visible."""
    return next((e.version for e in store.state.versions() if store.state.seq_of(e.version) == seq), None)


def _version(store: Store, entry: VersionEntry, deep: bool, broken: set[int]) -> Iterator[Problem]:
    folder = f"{store.place.url}/{entry.folder}"
    manifest, problem = _manifest(store, entry)
    if problem is not None:
        yield problem
    if manifest is None:
        return
    whole = True
    for blob in manifest.blobs:
        if _let_go(store, entry.version, blob):
            continue
        try:
            key = f"{entry.folder}/{blob.name}"
            path = store.place.file(key, nbytes=blob.nbytes, sha256=blob.sha256)
            check_blob(path, blob, again=True)
        except Missing:
            whole = False
            yield Problem("blob", entry.version, f"{folder}/{blob.name}", f"it is missing; {_RESTORE}")
        except (IntegrityError, Unavailable) as error:
            whole = False
            yield Problem("blob", entry.version, f"{folder}/{blob.name}", f"{error.message}; {_RESTORE}")
    if entry.base is not None and not store.state.holds_anchor(entry.version):
        if entry.base in store.state.retired:
            yield Problem(
                "chain", entry.version, folder, f"its base {entry.base} is retired; pin what must stay"
            )
            return
        if entry.base in broken:
            yield Problem("chain", entry.version, folder, f"its base {entry.base} is damaged; repair that")
            return
    if whole:
        yield from _content(store, entry, deep)


def _let_go(store: Store, version: int, blob: Blob) -> bool:
    """Did retention say that this file goes, and that its version stays?"""
    if blob.role == "attachment":
        return version in store.state.detached
    return blob.role in ("anchor", "index") and version in store.state.thinned


def _manifest(store: Store, entry: VersionEntry) -> tuple[Manifest | None, Problem | None]:
    key = f"{entry.folder}/{manifests.MANIFEST}"
    path = f"{store.place.url}/{key}"
    try:
        data = store.place.read(key)
        if manifests.digest_of(data) != entry.digest:
            return None, Problem(
                "manifest", entry.version, path, f"it differs from its digest in the log; {_RESTORE}"
            )
        return manifests.decode(data, where=path), None
    except Missing:
        return None, Problem("manifest", entry.version, path, f"it is missing; {_RESTORE}")
    except (Unavailable, FormatError) as error:
        return None, Problem("manifest", entry.version, path, error.message)


def _content(store: Store, entry: VersionEntry, deep: bool) -> Iterator[Problem]:
    """The digests add up; when `deep`, every tensor that is rebuilt has the digest of its manifest."""
    folder = f"{store.place.url}/{entry.folder}"
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
