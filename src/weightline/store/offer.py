"""What a caller offers to commit, checked against the newest version before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from weightline import codec
from weightline.codec import Delta, TensorChange, bits_of, from_bits, spec_of, specs_of
from weightline.codec.dtypes import Bits
from weightline.core.request import check_label
from weightline.errors import ConflictError, FormatError, InvalidInput
from weightline.store import checkpoint
from weightline.store import safetensors_file as files
from weightline.store.manifest import TensorEntry
from weightline.types import TensorSpec

MAX_ATTACHMENT_NAME = 100
MAX_STEP = 2**63 - 1
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48, "F8_E5M2": 0x7C}
"""A value of these dtypes is infinite or NaN when all bits of its exponent are set."""
_NAN_FP8 = 0x7F
_PIECE = 1 << 22


class Options(Struct, frozen=True, kw_only=True):
    """The options of `Line.commit`."""

    step: int | None = None
    partial: bool = False
    anchor: bool = False
    attachments: Mapping[str, Path | str | bytes] = {}
    label: str | None = None
    metadata: Mapping[str, Any] = {}
    model_files: Path | None = None
    commit_id: str | None = None
    check_finite: bool = False


_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "partial": (bool,),
    "anchor": (bool,),
    "attachments": (Mapping,),
    "label": (str,),
    "metadata": (Mapping,),
    "model_files": (str, Path),
    "commit_id": (str,),
    "check_finite": (bool,),
}


def options_of(given: Mapping[str, Any]) -> Options:
    """The options from keyword arguments; None means the default. Raises `InvalidInput`."""
    faults = []
    for name, value in given.items():
        if name not in _TYPES:
            faults.append(f"unknown option {name!r}")
        elif value is not None and (
            not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name])
        ):
            faults.append(f"{name} is a {type(value).__name__}")
    if faults:
        raise InvalidInput(f"commit: {'; '.join(faults)}", hint="see the options of commit()")
    chosen = {name: value for name, value in given.items() if value is not None}
    if "model_files" in chosen:
        chosen["model_files"] = Path(chosen["model_files"])
    options = Options(**chosen)
    check_options(options)
    return options


def check_options(options: Options) -> None:
    """Raises `InvalidInput` for options that could not be stored."""
    if options.label is not None:
        check_label(options.label)
    if options.step is not None and not 0 <= options.step <= MAX_STEP:
        raise InvalidInput(f"step {options.step} is not within 0..{MAX_STEP}", hint="count optimizer steps")
    for name, value in options.attachments.items():
        plain = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_ATTACHMENT_NAME
        if not plain or Path(name).name != name or name.startswith("."):
            raise InvalidInput(
                f"attachment name {name!r} is not a plain file name", hint='use a name such as "optimizer.pt"'
            )
        if not isinstance(value, bytes | str | Path):
            raise InvalidInput(
                f"attachment {name!r} is a {type(value).__name__}", hint="give bytes or a file"
            )
        if not isinstance(value, bytes) and not Path(value).is_file():
            raise InvalidInput(
                f"attachment {name!r}: {value} is not a file",
                hint="give bytes or a file; pack a folder with tar",
            )
    try:
        json.dumps(dict(options.metadata), allow_nan=False)
        if not all(isinstance(key, str) for key in options.metadata):
            raise TypeError("its keys must be strings")
        msgspec.json.encode(dict(options.metadata))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"metadata cannot be stored as JSON: {error}", hint="use plain values") from None
    if options.model_files is not None:
        checkpoint.model_files(options.model_files)


def read_offer(
    weights: Mapping[str, Any] | str | Path | Delta, model_files: Path | None
) -> tuple[Mapping[str, Any] | Delta, Path | None]:
    """Weights or a delta from what the caller gave, and the folder of its model files if there is one."""
    if isinstance(weights, Delta):
        return weights, model_files
    if isinstance(weights, str | Path):
        path = Path(weights)
        if path.is_file() and _is_delta(path):
            return codec.read_delta(path), model_files
        mapped = checkpoint.load_path(path)
        return mapped, model_files if model_files is not None or not path.is_dir() else path
    if not isinstance(weights, Mapping):
        raise InvalidInput(
            f"weights are a {type(weights).__name__}",
            hint="give a mapping of name to array, a path, or a Delta",
        )
    if faults := [repr(name) for name in weights if not isinstance(name, str) or not name]:
        raise InvalidInput(f"tensor names must be strings that are not empty: {', '.join(faults)}")
    return weights, model_files


def check_first(weights: Mapping[str, Any] | str | Path | Delta, given: Mapping[str, Any]) -> None:
    """Raises what the first commit of a new store would, as far as it can be told without one."""
    options = options_of(given)
    offered, _ = read_offer(weights, options.model_files)
    if isinstance(offered, Delta):
        if any(change.index is not None for change in offered.changes()):
            raise ConflictError("a delta cannot be the first version", hint="commit the whole weights first")
        return
    check_names(offered, {}, options)
    if options.check_finite:
        check_finite(offered)


def _is_delta(path: Path) -> bool:
    try:
        return files.read_header(path).metadata.get("format", "").startswith("weightline.")
    except FormatError:
        return False


def check_names(offered: Mapping[str, Any], head: Mapping[str, TensorEntry], options: Options) -> bool:
    """Do the offered tensors have the names, dtypes and shapes of the head? Raises `InvalidInput` listing all
    misfits.

    False: they differ and `anchor=True` allows it.
    """
    specs = specs_of(offered)
    if not specs and not (head and options.partial):
        raise InvalidInput("there are no tensors to commit", hint="pass the model's state dict")
    faults = [f"unknown {name!r}" for name in specs if name not in head]
    if not options.partial:
        faults += [f"missing {name!r}" for name in head if name not in specs]
    for name, spec in specs.items():
        if name in head and head[name].spec != spec:
            was = head[name].spec
            faults.append(f"{name!r} was {was.dtype}{list(was.shape)} and is {spec.dtype}{list(spec.shape)}")
    if not faults or not head:
        return not faults
    if options.anchor and not options.partial:
        return False
    raise InvalidInput(
        f"the weights do not match the newest version: {'; '.join(faults)}",
        hint="offer every tensor, or some with partial=True; anchor=True allows a changed model",
    )


def check_delta(
    delta: Delta, base: int | None, head: Mapping[str, TensorEntry], bits: Mapping[str, Bits]
) -> Delta:
    """The delta, proved to lead from the head to the digests it declares. Raises `ConflictError`,
    `InvalidInput`.
    """
    if delta.base is not None and delta.base != base:
        raise ConflictError(
            f"the delta is against version {delta.base}, the newest is {base}",
            hint="make it against the newest version",
        )
    faults = []
    for change in delta.changes():
        name = change.spec.name
        if name not in head or head[name].spec != change.spec:
            faults.append(f"{name!r} {change.spec.dtype}{list(change.spec.shape)} is not in version {base}")
        elif after_of(change, head[name].digest, bits[name]) != change.digest:
            faults.append(f"{name!r} does not start from version {base}")
    if faults:
        raise ConflictError(
            f"the delta does not fit the newest version: {'; '.join(faults)}",
            hint="make it against the newest version",
        )
    return delta


def after_of(change: TensorChange, before: str, bits: Bits) -> str:
    """Digest of a tensor with `bits` and digest `before` once `change` is applied."""
    if change.index is None:
        return codec.digest_of(change.bits)
    if change.base_digest != before:
        return ""
    index = np.ascontiguousarray(change.index)
    return codec.digest_update(before, index, bits[index], np.ascontiguousarray(change.bits))


def check_finite(offered: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` naming every tensor that holds an infinity or NaN, and the first element."""
    faults = []
    for name, array in offered.items():
        first = _first_not_finite(spec_of(name, array).dtype, bits_of(array))
        if first is not None:
            faults.append(f"{name!r} at element {first}")
    if faults:
        raise InvalidInput(
            f"not finite: {'; '.join(faults)}", hint="skip this step, or commit without check_finite=True"
        )


def _first_not_finite(dtype: str, bits: Bits) -> int | None:
    if dtype == "C64":
        inside = _first_not_finite("F32", bits.view(np.uint32))
        return None if inside is None else inside // 2
    mask = _NAN_FP8 if dtype == "F8_E4M3" else _EXPONENT.get(dtype)
    if mask is None:
        return None
    full = bits.dtype.type(mask)
    for begin in range(0, bits.size, _PIECE):
        found = (bits[begin : begin + _PIECE] & full) == full
        if found.any():
            return begin + int(np.argmax(found))
    return None


def arrays(bits: Mapping[str, Bits], head: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Name -> array over the given bits."""
    return {name: from_bits(flat, head[name].spec) for name, flat in bits.items()}


def raw_size(specs: Mapping[str, TensorSpec]) -> tuple[int, int]:
    """(bytes, elements) of the tensors."""
    return sum(map(codec.nbytes_of, specs.values())), sum(map(codec.count_of, specs.values()))
