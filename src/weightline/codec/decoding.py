"""From a coded delta and its base to absolute changes: base checked, decoded, result checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightline.codec import digest
from weightline.codec.coded import CodedFile
from weightline.codec.delta import Source, Subset
from weightline.codec.diffing import sum_lanes
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


def decode_bits(source: Source, bits: Mapping[str, Bits], digests: Mapping[str, str] | None) -> Scanned:
    """The same, given the bits of tensors whose shapes are right."""
    file = source.parent if isinstance(source, Subset) else source
    if not isinstance(file, CodedFile):
        raise InvalidInput(f"level {source.level!r} cannot be decoded", hint="read the delta from its file")
    names = list(source.specs)
    carried = {} if digests is None else {name: digests[name] for name in names if name in digests}
    before = {name: carried.get(name) or digest.digest_of(bits[name]) for name in names}
    file.check_base(before)
    segments = file.decode(names, bits)
    gains = sum_lanes(segments)
    after = {}
    for at, name in enumerate(names):
        after[name] = digest.moved(before[name], gains[at]) if at in gains else before[name]
    file.check_digests(before, after)
    specs = [source.specs[name] for name in names]
    return Scanned(specs, segments, {name: (before[name], after[name]) for name in names})
