"""Decoding a delta that is told relative to its base: base checked, decoded, result checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weightline.codec import digest
from weightline.codec.coded import CodedFile
from weightline.codec.coding import Segment, restore, tensors_of
from weightline.codec.delta import Source, Subset
from weightline.codec.dtypes import Bits, bits_of, spec_of
from weightline.codec.scanned import Scanned
from weightline.errors import InvalidInput


def _base_bits(source: Source, base: Mapping[str, Any]) -> dict[str, Bits]:
    faults, bits = [], {}
    for name, spec in source.specs.items():
        if name not in base:
            faults.append(f"missing {name!r}")
            continue
        found = spec_of(name, base[name])
        if found != spec:
            faults.append(
                f"{name!r} is {found.dtype}{list(found.shape)}, the delta has {spec.dtype}{list(spec.shape)}"
            )
        else:
            bits[name] = bits_of(base[name])
    if faults:
        raise InvalidInput(
            f"the delta does not fit these tensors: {'; '.join(faults)}",
            hint="pass the weights it was made for",
        )
    return bits


def decoded_source(source: Source, base: Mapping[str, Any], digests: Mapping[str, str] | None) -> Scanned:
    """`Delta.decoded`: base checked, decoded, result checked."""
    return decode_bits(source, _base_bits(source, base), digests)


def _after(before: Mapping[str, str], segments: Sequence[Segment]) -> dict[str, str]:
    """Digests after some changes, all at once: a model has many tensors with few changes each."""
    gains = np.zeros((len(before), 2), np.uint64)
    for segment in segments:
        np.add.at(gains, tensors_of(segment.pieces), segment.lanes)
    lanes = np.frombuffer(bytes.fromhex("".join(before.values())), ">u8").reshape(-1, 2)
    text = (lanes + gains).astype(">u8").tobytes().hex()
    return {name: text[32 * at : 32 * at + 32] for at, name in enumerate(before)}


def decode_bits(
    source: Source, bits: Mapping[str, Bits], digests: Mapping[str, str] | None, *, write: bool = False
) -> Scanned:
    """The same, given the bits of tensors whose shapes are right. With `write` the new bits are put into
    `bits` in the same pass; when the result is not what the file says, the old ones are back before this
    raises."""
    file = source.parent if isinstance(source, Subset) else source
    if not isinstance(file, CodedFile):
        raise InvalidInput(f"level {source.level!r} cannot be decoded", hint="read the delta from its file")
    names = list(source.specs)
    carried = {} if digests is None else digests
    before = {name: carried.get(name) or digest.digest_of(bits[name]) for name in names}
    if {*map(len, before.values())} - {32}:
        for found in before.values():
            digest.parse(found)
    file.check_base(before)
    segments = file.decode(names, bits, write=write)
    try:
        after = _after(before, segments)
        file.check_after(after)
    except BaseException:
        if write:
            for segment in segments:
                restore(segment)
        raise
    specs = [source.specs[name] for name in names]
    return Scanned(specs, segments, {name: (before[name], after[name]) for name in names})
