"""One version from several trainer ranks: each stages the ranges that it owns, rank 0 publishes.

A rank writes its ranges (what changed in them, or all of them) into a staging of its own and then a receipt:
`ranks/<commit>/<rank>.json`. Nothing of this can be seen. Rank 0 waits for one receipt from each rank of the
declared world, checks every part against its SHA-256 and that no element has two owners, and commits the
whole in the one atomic step of every commit. A rank that dies leaves no receipt, so nothing is published; its
staging is swept once its process is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from weightline import codec
from weightline.codec import Delta, bits_of, from_bits
from weightline.codec.dtypes import Bits
from weightline.core.seal import seal, unseal
from weightline.errors import ConflictError, FormatError, InvalidInput, Unavailable
from weightline.store import staging
from weightline.store.disk import sha256_of, typed
from weightline.store.manifest import VERSIONS, Blob
from weightline.store.place import Missing
from weightline.store.reading import check_blob
from weightline.types import TensorSpec, VersionRecord

if TYPE_CHECKING:
    from weightline.store.store import Store
    from weightline.store.writer import Writer

RANKS = "ranks"
PART = "part.safetensors"
_POLL_S = 0.02


class Shard(Struct, frozen=True, eq=False):
    """Elements `start` to `start + values.size` of a tensor, flat in C order, as one rank owns them."""

    spec: TensorSpec
    """Of the whole tensor."""
    start: int
    values: Any
    """numpy or torch, of the stored dtype; any shape, read in C order."""


class Range(Struct, frozen=True):
    """What a rank owns of one tensor: elements `start` (inclusive) to `stop` (exclusive)."""

    spec: TensorSpec
    start: int
    stop: int


class Receipt(Struct, frozen=True, kw_only=True):
    """One rank's part of one commit is complete and durable."""

    commit_id: str
    rank: int
    world: int
    step: int | None
    base: int | None
    """The part holds what changed since this version; None: all elements."""
    folder: str
    nbytes: int
    sha256: str
    ranges: tuple[Range, ...]


class Rank:
    """Rank `rank` of `world`. Keeps a copy of its ranges, to stage only what changed in them."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise InvalidInput(f"rank {rank} of {world}", hint="ranks count from 0")
        self._store = store
        self._rank = rank
        self._world = world
        self._held: dict[str, Any] = {}
        self._ranges: tuple[Range, ...] = ()
        self._commit_id = ""

    def stage(self, shards: Mapping[str, Shard], *, commit_id: str, step: int | None = None) -> Receipt:
        """Write this rank's ranges and a receipt; nothing becomes visible. The same call may be repeated.

        Raises `InvalidInput` for a shard that does not fit its tensor, `StorageFull`, `Unavailable`.
        """
        ranges = tuple(_range(name, shard) for name, shard in sorted(shards.items()))
        values = {name: _flat(shard) for name, shard in shards.items()}
        base = self._base(ranges)
        delta = codec.diff(self._held, values) if base is not None else codec.full(values)
        receipt = self._write(delta, ranges, base, commit_id, step)
        self._held = {name: np.array(array, copy=True) for name, array in values.items()}
        self._ranges, self._commit_id = ranges, commit_id
        return receipt

    def _base(self, ranges: tuple[Range, ...]) -> int | None:
        """The newest version, if it is what this rank staged last, in the same ranges."""
        self._store.refresh()
        last = self._store.state.by_commit(self._commit_id)
        if last is None or last.version != len(self._store.state) or ranges != self._ranges:
            return None
        return last.version

    def _write(
        self, delta: Delta, ranges: tuple[Range, ...], base: int | None, commit_id: str, step: int | None
    ) -> Receipt:
        store = self._store
        folder = staging.create(store.root, store.disk)
        try:
            with typed(str(folder)):
                store.disk.on_step(f"create {PART}")
                codec.write_delta(delta, folder / PART)
                staging.seal(folder, store.disk)
                nbytes, sha256 = (folder / PART).stat().st_size, sha256_of(folder / PART)
            relative = f"{VERSIONS}/{folder.name}"
            store.place.upload(relative, folder)
            receipt = Receipt(
                commit_id=commit_id,
                rank=self._rank,
                world=self._world,
                step=step,
                base=base,
                folder=relative,
                nbytes=nbytes,
                sha256=sha256,
                ranges=ranges,
            )
            store.place.put(_key(commit_id, self._rank), seal(msgspec.json.encode(receipt)))
            if not staging.is_here(store):
                store.disk.remove_tree(folder)  # it was uploaded
        except BaseException:
            staging.discard(folder, store)
            raise
        return receipt


def commit_ranks(
    writer: Writer,
    store: Store,
    *,
    commit_id: str,
    world: int,
    step: int | None = None,
    timeout: float = 600.0,
    pause: Callable[[float], object] | None = None,
    **options: Any,
) -> VersionRecord:
    """Publish what all ranks of `world` staged under `commit_id`; on rank 0, which holds the whole weights.

    Takes the other options of `Line.commit` too. Repeating it is safe. Raises `Unavailable` naming the ranks
    that did not stage within `timeout` seconds (nothing is published), `ConflictError` for parts against
    another version or of another step, `InvalidInput` for ranges that overlap or leave a gap,
    `IntegrityError` for a damaged part.
    """
    store.refresh()
    if (done := store.state.by_commit(commit_id)) is not None:
        return store.record(done.version)
    receipts = _await(store, commit_id, world, timeout, pause or threading.Event().wait)
    head, held = writer.head()
    _check(receipts, world, step, head)
    weights = _assemble(store, receipts, held)
    # Tensors in which nothing changed are in no part.
    partial = head is not None and weights.keys() <= held.keys()
    record = writer.commit(weights, commit_id=commit_id, step=step, partial=partial, **options)
    forget(store, receipts)
    return record


def forget(store: Store, receipts: list[Receipt]) -> None:
    """Delete parts and receipts, which nobody needs once their version is there or given up."""
    for receipt in receipts:
        store.place.delete(_key(receipt.commit_id, receipt.rank))
        store.place.delete_folder(receipt.folder)


def receipts_of(store: Store, commit_id: str) -> list[Receipt]:
    """The receipts for one commit, by rank. Raises `FormatError` for a damaged one."""
    found = []
    for item in list(store.place.list(_folder(commit_id))):
        where = f"{store.place.url}/{item.key}"
        hint = "stage that rank again"
        try:
            body = unseal(store.place.read(item.key), where=where, hint=hint)
            found.append(msgspec.json.decode(body, type=Receipt))
        except Missing:
            continue
        except msgspec.DecodeError as error:
            raise FormatError(f"{where} is no receipt: {error}", hint=hint) from None
    return sorted(found, key=lambda receipt: receipt.rank)


def sweep_receipts(store: Store) -> list[str]:
    """Delete receipts whose part is gone: its rank died and was swept."""
    gone = []
    for item in list(store.place.list(RANKS)):
        try:
            body = unseal(store.place.read(item.key), where=item.key, hint="")
            folder = msgspec.json.decode(body, type=Receipt).folder
        except (Missing, FormatError, msgspec.DecodeError):
            continue
        if store.place.size(f"{folder}/{PART}") is None:
            store.place.delete(item.key)
            gone.append(item.key)
    return gone


def _await(
    store: Store, commit_id: str, world: int, timeout: float, pause: Callable[[float], object]
) -> list[Receipt]:
    until = time.monotonic() + timeout
    while True:
        receipts = receipts_of(store, commit_id)
        missing = sorted(set(range(world)) - {receipt.rank for receipt in receipts})
        if not missing:
            return receipts
        if time.monotonic() >= until:
            raise Unavailable(
                f"commit {commit_id!r}: rank {', '.join(map(str, missing[:8]))} of {world} did not stage",
                hint="nothing was published; stage on every rank and publish again with the same commit_id",
            )
        pause(_POLL_S)


def _check(receipts: list[Receipt], world: int, step: int | None, head: int | None) -> None:
    for receipt in receipts:
        if receipt.world != world or receipt.rank >= world or receipt.step != step:
            raise ConflictError(
                f"rank {receipt.rank} staged step {receipt.step} of a world of {receipt.world}, "
                f"not step {step} of {world}",
                hint="stage again on every rank, with one commit_id for each step",
            )
        if receipt.base is not None and receipt.base != head:
            raise ConflictError(
                f"rank {receipt.rank} staged against version {receipt.base}, the newest is {head}",
                hint="stage again on every rank",
            )
    owned: dict[str, list[tuple[int, int, int]]] = {}
    for receipt in receipts:
        for part in receipt.ranges:
            owned.setdefault(part.spec.name, []).append((part.start, part.stop, receipt.rank))
    for name, parts in owned.items():
        parts.sort()
        for (_, stop, one), (start, _, other) in itertools.pairwise(parts):
            if start < stop:
                raise InvalidInput(
                    f"ranks {one} and {other} both own element {start} of {name!r}",
                    hint="give each element one owner (replicated ones to the lowest rank)",
                )


def _assemble(store: Store, receipts: list[Receipt], held: Mapping[str, Bits]) -> dict[str, Any]:
    """Name -> array of every tensor that some rank wrote to, put together in memory of its own."""
    whole: dict[str, Bits] = {}
    specs: dict[str, TensorSpec] = {}
    filled: dict[str, int] = {}
    for receipt in receipts:
        blob = Blob(PART, receipt.nbytes, receipt.sha256, "delta")
        key = f"{receipt.folder}/{PART}"
        try:
            path = store.place.file(key, nbytes=receipt.nbytes, sha256=receipt.sha256)
        except Missing:
            raise Unavailable(f"{key} of rank {receipt.rank} is gone", hint="stage that rank again") from None
        check_blob(Path(path), blob)
        delta = codec.read_delta(path)
        ranges = {part.spec.name: part for part in receipt.ranges}
        for change in delta.changes():
            part = ranges[change.spec.name]
            name = part.spec.name
            if name not in whole:
                specs[name] = part.spec
                empty = np.zeros(codec.count_of(part.spec), change.bits.dtype)
                whole[name] = np.array(held[name], copy=True) if name in held else empty
            at: Any = slice(part.start, part.stop) if change.index is None else change.index + part.start
            whole[name][at] = change.bits
        if receipt.base is None:
            for part in receipt.ranges:
                filled[part.spec.name] = filled.get(part.spec.name, 0) + part.stop - part.start
    gaps = [n for n, spec in specs.items() if n not in held and filled.get(n, 0) != codec.count_of(spec)]
    if gaps:
        raise InvalidInput(f"no rank owns all of {', '.join(map(repr, gaps))}", hint="stage every element")
    return {name: from_bits(bits, specs[name]) for name, bits in whole.items()}


def _range(name: str, shard: Shard) -> Range:
    size = int(bits_of(shard.values).size)
    stop = shard.start + size
    dtype = codec.spec_of(name, shard.values).dtype
    if shard.spec.name != name or dtype != shard.spec.dtype:
        raise InvalidInput(f"shard {name!r} is {dtype} of {shard.spec.name!r} {shard.spec.dtype}")
    if not 0 <= shard.start < stop <= codec.count_of(shard.spec):
        raise InvalidInput(
            f"shard {name!r} covers elements {shard.start} to {stop} of {codec.count_of(shard.spec)}",
            hint="give the flat range in C order; leave out tensors of which a rank owns nothing",
        )
    return Range(shard.spec, shard.start, stop)


def _flat(shard: Shard) -> Any:
    bits = bits_of(shard.values)
    return from_bits(bits, TensorSpec(shard.spec.name, shard.spec.dtype, (int(bits.size),)))


def _folder(commit_id: str) -> str:
    return f"{RANKS}/{hashlib.sha256(commit_id.encode()).hexdigest()[:32]}"


def _key(commit_id: str, rank: int) -> str:
    return f"{_folder(commit_id)}/{rank:05d}.json"
