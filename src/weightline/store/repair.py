"""Repair: mend what another copy of the same bytes can mend, and nothing else.

Entries are copied out of index blocks, anchors are written again from the chain beneath them, and everything
derived is made anew. Whatever is written has the digest that the log or a manifest names; no digest is ever
changed to fit.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from weightline.codec import bits_of, specs_of
from weightline.core import ledger
from weightline.core.ledger import VersionEntry
from weightline.errors import FormatError, IntegrityError, Unavailable, WeightlineError
from weightline.store import checkpoint, staging
from weightline.store.mirror_repair import repair_mirror
from weightline.store.place import Missing
from weightline.store.reading import check_blob, remember

if TYPE_CHECKING:
    from weightline.store.store import Store

logger = logging.getLogger(__name__)


def repair(store: Store) -> list[str]:
    """See `Store.repair`. Never raises for what it cannot mend: `verify` tells."""
    done = [*repair_mirror(store.place), *_entries(store), *_index(store)]
    if store.log.hint() != store.state.seq:
        store.log.write_hint(store.state.seq)
        done.append(f"wrote the hint anew: entry {store.state.seq} is the newest")
    for entry in store.state.versions():
        if entry.version not in store.state.retired and store.state.holds_anchor(entry.version):
            done += _anchor(store, entry)
    for line in done:
        logger.warning("repair of %s: %s", store.place.url, line)
    return done


def _entries(store: Store) -> list[str]:
    """Put back entries that are damaged or missing in the log and whole in a block of the index."""
    done = []
    for first, last in store.log.index.present():
        try:
            lines = store.log.index.lines(first, last)
        except (Missing, FormatError, IntegrityError, Unavailable):
            continue
        for seq, line in enumerate(lines, first):
            try:
                if ledger.encode(ledger.decode(line)) == line and store.log.read(seq) is not None:
                    continue
            except FormatError:
                pass
            try:
                ledger.decode(line)
            except FormatError:
                continue
            store.place.put(store.log.key(seq), line)
            done.append(f"put back log entry {seq} from the index")
    if done:
        store.damage = None
    try:
        store.read_log()
        store.log.check_gap(store.state, thorough=True)
    except (FormatError, IntegrityError) as error:
        store.damage = error
    return done


def _index(store: Store) -> list[str]:
    done = []
    for first, last in store.log.index.present():
        try:
            store.log.index.lines(first, last)
        except Missing:
            continue
        except (FormatError, IntegrityError) as error:
            store.place.delete(store.log.index.key(first, last))
            done.append(f"deleted a damaged block of the index: {error.message}")
    try:
        done += [f"wrote index block {f}-{last}" for f, last in store.log.index.write(store.state.seq)]
    except (Missing, FormatError, IntegrityError, Unavailable) as error:
        logger.warning("the index cannot be written: %s", error)
    return done


def _anchor(store: Store, entry: VersionEntry) -> list[str]:
    """Write the files of a damaged anchor again, out of the version before and the delta that lies beside."""
    try:
        manifest = store.reading.stored(entry.version)
    except WeightlineError:
        return []
    bad = []
    for blob in (*manifest.named("anchor"), *manifest.named("index")):
        try:
            key = f"{entry.folder}/{blob.name}"
            check_blob(store.place.file(key, nbytes=blob.nbytes, sha256=blob.sha256), blob, again=True)
        except (Missing, IntegrityError, Unavailable):
            bad.append(blob)
    if not bad:
        return []
    try:
        weights = store.reading.load_through(entry.version)
        made = _written(store, entry, weights)
    except (WeightlineError, OSError) as error:
        logger.warning("the anchor of version %d cannot be made again: %s", entry.version, error)
        return []
    done = []
    for blob in bad:
        if made.get(blob.name) == blob.sha256:
            done.append(f"wrote {blob.name} of version {entry.version} again, from the versions before it")
    return done


def _written(store: Store, entry: VersionEntry, weights: dict[str, object]) -> dict[str, str]:
    """Write the anchor to a staging of its own and move what has the right digest into place."""
    manifest = store.reading.stored(entry.version)
    wanted = {blob.name: blob for blob in (*manifest.named("anchor"), *manifest.named("index"))}
    folder = staging.create(store.root, store.disk)
    try:
        blobs = checkpoint.write_anchor(
            store.disk,
            folder,
            list(specs_of(weights).values()),
            lambda name: bits_of(weights[name]),
            shard_nbytes=_shard_nbytes(store, [b.nbytes for b in wanted.values() if b.role == "anchor"]),
        )
        if {b.name: b.sha256 for b in blobs} != {name: b.sha256 for name, b in wanted.items()}:
            raise IntegrityError(f"the anchor of version {entry.version} came out different")
        (folder / staging.OWNER).rename(folder / f".{staging.OWNER}")
        if staging.is_here(store):
            target = store.root / entry.folder
            target.mkdir(exist_ok=True)
            for blob in blobs:
                (folder / blob.name).replace(target / blob.name)
                remember(target / blob.name, blob.sha256)
            store.disk.fsync_folder(target)
        else:
            store.place.upload(entry.folder, folder)
        return {blob.name: blob.sha256 for blob in blobs}
    finally:
        store.disk.remove_tree(folder)


def _shard_nbytes(store: Store, sizes: list[int]) -> int:
    return store.shard_nbytes if len(sizes) > 1 else max(store.shard_nbytes, *sizes)
