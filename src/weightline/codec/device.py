"""Compare, digest and apply for torch tensors where they live, with torch operations: on a GPU only the
changes cross the bus.

The same results as on the host. Extra memory is bounded by a chunk of CHUNK elements (about 40 bytes each
for the digest, 10 for the
compare). Needs torch; imported by hand, never by `weightline.codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from weightline.codec import digest
from weightline.codec.delta import Delta, Held, TensorChange, check_change
from weightline.codec.diffing import require_same
from weightline.codec.digest import A, B, C, S
from weightline.codec.dtypes import Bits, bits_dtype, spec_of, specs_of, torch_flat
from weightline.errors import IntegrityError, InvalidInput

CHUNK = 1 << 22
"""Elements that are worked on at a time."""
_MASK = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: -1}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(index: Any, bits: Any, lane: int) -> Any:
    """Sum of the digest's mixing function over elements, as an int64 tensor (arithmetic is modulo 2^64)."""
    x = index * _signed(A[lane]) + _signed(S[lane]) + bits * _signed(B[lane])
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * _signed(C[lane])
    return (x ^ ((x >> 32) & 0xFFFFFFFF)).sum()


def _wide(flat: Any) -> Any:
    """Bits as non-negative int64 (64-bit elements as they are)."""
    return flat.to(torch.int64) & _MASK[flat.element_size()]


def digest_of(tensor: Any) -> str:
    """Additive digest of a tensor, computed on its device; the value of
    `codec.digest_of(codec.bits_of(tensor))`."""
    flat = torch_flat(tensor)
    lanes = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        bits = _wide(flat[start : start + CHUNK])
        index = torch.arange(start, start + bits.numel(), device=flat.device)
        lanes += torch.stack([_mix(index, bits, 0), _mix(index, bits, 1)])
    return digest.render(lanes.cpu().numpy().view(np.uint64))


def _to_host(part: Any, dtype: str) -> Bits:
    return np.asarray(part.cpu().numpy()).view(bits_dtype(dtype))


def diff(
    old: Mapping[str, Any], new: Mapping[str, Any], *, old_digests: Mapping[str, str] | None = None
) -> Delta:
    """`codec.diff` at level "absolute" for torch tensors, compared on their device. Old and new must share a
    device.

    Raises `InvalidInput` listing every mismatch. `write_delta(…, level="fast")` takes the result as it is.
    """
    specs = specs_of(old)
    require_same(specs, specs_of(new))
    changes = []
    for name, spec in specs.items():
        if old[name].device != new[name].device:
            raise InvalidInput(
                f"tensor {name!r} is on two devices", hint="keep the shadow where the weights are"
            )
        a, b = torch_flat(old[name]), torch_flat(new[name])
        parts: list[tuple[Any, ...]] = []
        for start in range(0, a.numel(), CHUNK):
            was, now = a[start : start + CHUNK], b[start : start + CHUNK]
            at = (was != now).nonzero().reshape(-1)
            if at.numel():
                parts.append(
                    (_index(at + start), _to_host(was[at], spec.dtype), _to_host(now[at], spec.dtype))
                )
        if not parts:
            continue
        index, before, after = (np.concatenate([part[k] for part in parts]) for k in range(3))
        known = None if old_digests is None else old_digests.get(name)
        base = known or digest_of(old[name])
        changes.append(
            TensorChange(spec, index, after, digest.digest_update(base, index, before, after), base, before)
        )
    return Delta(Held(changes))


def _index(at: Any) -> Any:
    return at.cpu().numpy()


class Undo:
    """Old bits of what was written, on the device of each tensor."""

    def __init__(self, parts: list[tuple[Any, Any, Any]], digests: dict[str, str]) -> None:
        self._parts = parts
        self.digests = digests
        """Digest of each written tensor after the apply."""

    def restore(self) -> None:
        """Put the old bits back."""
        for flat, at, old in self._parts:
            if at is None:
                flat.copy_(old)
            else:
                flat[at] = old


def apply_(delta: Delta, tensors: Mapping[str, Any], *, digests: Mapping[str, str] | None = None) -> Undo:
    """`Delta.apply_` for contiguous torch tensors on any device, from an absolute delta.

    Checks are those of `codec.apply_`, before the first write; only indexes, new bits and old bits of the
    changes cross the bus. A digest of the base that is not carried is recomputed on the device.
    Raises `InvalidInput` or `IntegrityError`.
    """
    if delta.level != "absolute":
        raise InvalidInput(
            "a delta told relative to its base is decoded on the host", hint="call delta.decoded(base)"
        )
    parts, after = [], {}
    writes = []
    for change in delta.changes():
        check_change(change)
        name, spec = change.spec.name, change.spec
        if name not in tensors or spec_of(name, tensors[name]) != spec:
            raise InvalidInput(
                f"the delta does not fit tensor {name!r}", hint="apply it to the weights it was made for"
            )
        tensor = tensors[name]
        if not tensor.is_contiguous():
            raise InvalidInput(
                f"tensor {name!r} is not contiguous", hint="apply to the tensor that owns the memory"
            )
        flat = torch_flat(tensor)
        signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[flat.element_size()]
        new = torch.from_numpy(np.array(change.bits).view(signed)).to(flat.device)
        at = None if change.index is None else torch.from_numpy(np.array(change.index)).to(flat.device)
        old = flat.clone() if at is None else flat[at]
        if at is not None and change.index is not None and change.base_digest is not None:
            carried = (None if digests is None else digests.get(name)) or digest_of(tensor)
            moved = digest.digest_update(
                change.base_digest, change.index, _to_host(old, spec.dtype), change.bits
            )
            if moved != change.digest or carried != change.base_digest:
                raise IntegrityError(
                    f"tensor {name!r} does not hold the delta's base", hint="take the full version"
                )
        parts.append((flat, at, old))
        writes.append(new)
        after[name] = change.digest
    for (flat, at, _), new in zip(parts, writes, strict=True):
        if at is None:
            flat.copy_(new)
        else:
            flat[at] = new
    return Undo(parts, after)


__all__ = ["CHUNK", "Undo", "apply_", "diff", "digest_of"]
