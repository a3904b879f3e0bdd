"""Lossless patches of safetensors files and sharded Hugging Face folders, in bounded memory.

Memory is a few chunks a thread, whatever the size of the model; results appear under their name only when
they are complete.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightline.codec import backend, digest
from weightline.codec.coded import CodedFile
from weightline.codec.codedindex import make_index
from weightline.codec.coding import CHUNK_LOG2, K_FIELDS, R_HITS, Piece, Rows, Segment
from weightline.codec.container import INDEX, fsync_folder, write_streams
from weightline.codec.delta import Delta
from weightline.codec.diffing import by_dtype, compare, require_same
from weightline.codec.dtypes import Bits, address_of, count_of, nbytes_of
from weightline.codec.reading import read_delta
from weightline.codec.tables import pack
from weightline.codec.weightfiles import Located, Reader, locate, read_header, shards_of
from weightline.errors import IntegrityError, InvalidInput, Unavailable

Progress = Callable[[int, int], None]
"""Called with the bytes of weights done and the bytes in all."""
_COPY = 1 << 22


class Patch(NamedTuple):
    """What `diff_files` did."""

    nbytes: int
    """Bytes of the delta file."""
    elements: int
    changed: int
    """Elements that differ."""
    raw_nbytes: int
    tensors: int
    """Tensors that differ."""


class _Chunk(NamedTuple):
    name: str
    start: int
    elements: int


class _Totals:
    """What is gathered while the chunks of a diff come in, in file order."""

    def __init__(self) -> None:
        self.chunks: dict[str, list[Rows]] = {}
        self.classes: dict[str, list[Rows]] = {}
        self.counts: dict[str, int] = {}
        self.before: dict[str, npt.NDArray[np.uint64]] = {}
        self.gain: dict[str, npt.NDArray[np.uint64]] = {}

    def add(self, chunk: _Chunk, segment: Segment, lanes: npt.NDArray[np.uint64]) -> bytes:
        name, coded = chunk.name, segment.coded
        if coded is None:
            raise InvalidInput("this chunk is not encoded", hint='use level "fast" or "dense"')
        zero = np.zeros(2, np.uint64)
        self.before[name] = self.before.get(name, zero) + lanes
        self.gain[name] = self.gain.get(name, zero) + segment.lanes[0]
        self.counts[name] = self.counts.get(name, 0) + int(segment.rows[0, R_HITS])
        self.chunks.setdefault(name, []).append(coded.chunks)
        self.classes.setdefault(name, []).append(coded.classes)
        return coded.data


def _chunks(tensors: dict[str, Located], level: str) -> list[_Chunk]:
    specs = [located.spec for located in tensors.values()]
    size = 1 << CHUNK_LOG2[level]
    return [
        _Chunk(specs[at].name, start, min(size, count_of(specs[at]) - start))
        for _, ordinals in by_dtype(specs)
        for at in ordinals
        for start in range(0, count_of(specs[at]), size)
    ]


def diff_files(
    old: str | Path,
    new: str | Path,
    out: str | Path,
    *,
    level: str = "dense",
    progress: Progress | None = None,
) -> Patch:
    """Write the delta that turns the weights in `old` into those in `new` to `out`.

    `old` and `new` are safetensors files or Hugging Face folders, sharded as they like. Only weights are
    compared; other files of a
    folder (config, tokenizer) are not part of a patch. Raises `InvalidInput` (listing every mismatch) or
    `FormatError`.
    """
    if level not in ("fast", "dense"):
        raise InvalidInput(f"unknown level {level!r} for files", hint='use "fast" or "dense"')
    out = Path(out)
    before, after = locate(Path(old)), locate(Path(new))
    require_same({n: t.spec for n, t in before.items()}, {n: t.spec for n, t in after.items()})
    total = sum(nbytes_of(located.spec) for located in before.values())
    totals, done, size = _Totals(), 0, 0
    if not out.parent.is_dir():
        raise InvalidInput(f"there is no folder {out.parent}", hint="create it first")
    with Reader(before) as a, Reader(after) as b, tempfile.TemporaryFile(dir=out.parent) as spool:

        def work(chunk: _Chunk) -> tuple[_Chunk, Segment, npt.NDArray[np.uint64]]:
            was, now = (reader.read(chunk.name, chunk.start, chunk.elements) for reader in (a, b))
            piece = Piece(0, chunk.start, chunk.elements, address_of(was), address_of(now))
            segment = compare([piece], before[chunk.name].spec.dtype, level, 0.0)
            return chunk, segment, backend.digest_range(was, chunk.start)

        for chunk, segment, lanes in backend.map_ordered(work, _chunks(before, level)):
            data = totals.add(chunk, segment, lanes)
            spool.write(data)
            size += len(data)
            done += chunk.elements * segment.was.itemsize
            if progress is not None:
                progress(done, total)
        written = _write_patch(out, before, totals, level, spool, size)
    elements = sum(count_of(located.spec) for located in before.values())
    changed = sum(totals.counts.values())
    return Patch(written, elements, changed, total, sum(count > 0 for count in totals.counts.values()))


def _write_patch(
    out: Path, tensors: dict[str, Located], totals: _Totals, level: str, spool: Any, size: int
) -> int:
    changed = [name for name, count in totals.counts.items() if count]
    digests = {
        name: (digest.render(totals.before[name]), digest.render(totals.before[name] + totals.gain[name]))
        for name in changed
    }
    chunks = [rows for name in changed for rows in totals.chunks[name]]
    classes = [rows for name in changed for rows in totals.classes[name]]
    tables = (
        pack(np.concatenate(chunks), np.concatenate([np.empty((0, K_FIELDS), np.int64), *classes]))
        if chunks
        else b""
    )
    index = make_index((tensors[name].spec for name in changed), totals.counts, digests, level, None, None)
    sizes = {"coded": size, "tables": len(tables), INDEX: len(index)}
    spool.seek(0)
    return write_streams(out, sizes, {"coded": _pieces(spool), "tables": [tables], INDEX: [index]}, level)


def _pieces(handle: Any) -> Iterator[bytes]:
    while piece := handle.read(_COPY):
        yield piece


def apply_files(
    old: str | Path, delta: str | Path, out: str | Path, *, progress: Progress | None = None
) -> int:
    """Write the weights that `delta` makes of those in `old` to `out`; returns the bytes written.

    A folder keeps its shards, index, config and tokenizer; a file keeps its header, metadata included. Base
    and result are checked
    against the delta's digests while they pass. `out` must not exist; it appears when it is complete, or not
    at all.
    Raises `InvalidInput`, `FormatError` or `IntegrityError`.
    """
    old, out = Path(old), Path(out)
    if out.exists():
        raise InvalidInput(f"{out} is there already", hint="name a new place")
    if not out.parent.is_dir():
        raise InvalidInput(f"there is no folder {out.parent}", hint="create it first")
    change = read_delta(delta)
    tensors = locate(old)
    require_same(
        {name: change.specs[name] for name in change.changed},
        {name: tensors[name].spec for name in change.changed if name in tensors},
    )
    total = sum(nbytes_of(located.spec) for located in tensors.values())
    run = _Apply(change, tensors, total, progress)
    with _appearing(out, folder=old.is_dir()) as target, Reader(tensors) as reader:
        if old.is_dir():
            shards = shards_of(old)
            _copy_others(old, target, {shard.name for shard in shards})
            for shard in shards:
                run.shard(reader, shard, target / shard.name)
        else:
            run.shard(reader, old, target)
        run.finish()
    return run.written


@contextlib.contextmanager
def _appearing(out: Path, *, folder: bool) -> Iterator[Path]:
    """A temporary place beside `out` that becomes it at the end; removed after an error."""
    target = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    try:
        if folder:
            target.mkdir()
        yield target
        target.rename(out)
        fsync_folder(out.parent)
    except BaseException:
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        raise


def _copy_others(old: Path, target: Path, shards: set[str]) -> None:
    for entry in sorted(old.iterdir()):
        if entry.name in shards or (entry.name.startswith(".") and entry.name.endswith(".tmp")):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name)
        else:
            shutil.copy2(entry, target / entry.name)


class _Apply:
    """One run of `apply_files`."""

    def __init__(
        self, delta: Delta, tensors: dict[str, Located], total: int, progress: Progress | None
    ) -> None:
        self.delta, self.tensors = delta, tensors
        self.total, self.progress = total, progress
        self.done = self.written = 0
        self.before: dict[str, str] = {}
        self.after: dict[str, str] = {}

    def shard(self, reader: Reader, source: Path, target: Path) -> None:
        """Copy one shard with its tensors changed."""
        begin, _ = read_header(source)
        try:
            with target.open("xb") as handle:
                with source.open("rb") as original:
                    handle.write(original.read(begin))
                here = [located for located in self.tensors.values() if located.path == source]
                at = begin
                for located in sorted(here, key=lambda item: item.offset):
                    if located.offset != at:
                        raise InvalidInput(
                            f"{source}: its tensors leave holes", hint="write it again with safetensors"
                        )
                    self._tensor(reader, located, handle)
                    at += nbytes_of(located.spec)
                handle.flush()
                os.fsync(handle.fileno())
                self.written += handle.tell()
        except OSError as error:
            raise Unavailable(
                f"cannot write {target}: {error.strerror}", hint="free space and try again"
            ) from None

    def _tensor(self, reader: Reader, located: Located, handle: Any) -> None:
        name, spec = located.spec.name, located.spec
        chunk = 1 << (self._coded.index.chunk_log2 if self._coded else 20)
        pieces = [(start, min(chunk, count_of(spec) - start)) for start in range(0, count_of(spec), chunk)]
        changes = name in self.delta.specs
        absolute = None if self._coded or not changes else self.delta.change(name)

        def work(piece: tuple[int, int]) -> tuple[Bits, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
            start, elements = piece
            bits = reader.read(name, start, elements)
            zero = np.zeros(2, np.uint64)
            if not changes:
                return bits, zero, zero
            lanes = backend.digest_range(bits, start)
            if self._coded is not None:
                return self._coded_chunk(name, start // chunk, bits, lanes)
            if absolute is not None and absolute.index is not None:
                a, b = np.searchsorted(absolute.index, [start, start + elements])
                bits[absolute.index[a:b] - start] = absolute.bits[a:b]
            elif absolute is not None:
                bits = absolute.bits[start : start + elements]
            return bits, lanes, backend.digest_range(bits, start) - lanes

        before, gain = np.zeros(2, np.uint64), np.zeros(2, np.uint64)
        for bits, lanes, more in backend.map_ordered(work, pieces):
            before, gain = before + lanes, gain + more
            handle.write(bits.data.cast("B") if bits.size else b"")
            self.done += bits.nbytes
            if self.progress is not None:
                self.progress(self.done, self.total)
        if changes:
            self.before[name], self.after[name] = digest.render(before), digest.render(before + gain)

    @property
    def _coded(self) -> CodedFile | None:
        return self.delta.source if isinstance(self.delta.source, CodedFile) else None

    def _coded_chunk(
        self, name: str, k: int, bits: Bits, lanes: npt.NDArray[np.uint64]
    ) -> tuple[Bits, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        segment = self._coded.decode_one(name, k, bits) if self._coded else None
        if segment is None:
            return bits, lanes, np.zeros(2, np.uint64)
        bits[segment.pos] = segment.now
        return bits, lanes, segment.lanes[0]

    def finish(self) -> None:
        """Check every digest. Raises `IntegrityError`."""
        if self._coded is not None:
            self._coded.check_base(self.before)
            self._coded.check_after(self.after)
            return
        for change in self.delta.changes():
            name = change.spec.name
            if change.base_digest not in (None, self.before[name]) or change.digest != self.after[name]:
                raise IntegrityError(
                    f"tensor {name!r} does not hold the delta's base",
                    hint="apply it to the weights it was made for",
                )
