"""Anchors as plain Hugging Face folders, and weights that a user hands over as files.

An anchor holds every name of the version with its own bytes, names that share storage in the trainer
included: tied tensors cost their bytes twice, and in return every reader opens the folder, whether its config
ties them or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from weightline.codec import nbytes_of
from weightline.codec.dtypes import Bits
from weightline.errors import FormatError, InvalidInput
from weightline.store import safetensors_file as files
from weightline.store.disk import Disk
from weightline.store.manifest import Blob
from weightline.types import TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_NBYTES = 4 << 30
"""Default size above which an anchor is written in shards."""
_METADATA = {"format": "pt"}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"}
_MAX_MODEL_FILE = 256 << 20
_HEADER_ENTRY = 128
"""Bytes that one tensor takes in a header beside its name, generously."""


class _Index(Struct):
    weight_map: dict[str, str]


def shards(specs: Sequence[TensorSpec], shard_nbytes: int) -> list[list[TensorSpec]]:
    """Splits tensors, in order of name, into files of at most `shard_nbytes` (one larger tensor is a file of
    its own).

    A file whose header would grow too long for readers is split as well.
    """
    out: list[list[TensorSpec]] = [[]]
    size = header = 0
    for spec in sorted(specs):
        nbytes, entry = nbytes_of(spec), _HEADER_ENTRY + 6 * len(spec.name)
        if out[-1] and (size + nbytes > shard_nbytes or header + entry > files.MAX_HEADER):
            out.append([])
            size = header = 0
        out[-1].append(spec)
        size, header = size + nbytes, header + entry
    return out


def write_anchor(
    disk: Disk,
    folder: Path,
    specs: Sequence[TensorSpec],
    bits: Callable[[str], Bits],
    *,
    shard_nbytes: int = SHARD_NBYTES,
) -> list[Blob]:
    """Write the tensors into `folder` as `from_pretrained` expects them; gives the blobs (or `OSError`)."""
    parts = shards(specs, shard_nbytes)
    if len(parts) == 1:
        nbytes, sha = disk.write_new(folder / SINGLE, files.stream(specs, bits, _METADATA))
        return [Blob(SINGLE, nbytes, sha, "anchor")]
    blobs, weight_map = [], {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        nbytes, sha = disk.write_new(folder / name, files.stream(part, bits, _METADATA))
        blobs.append(Blob(name, nbytes, sha, "anchor"))
        weight_map.update(dict.fromkeys((spec.name for spec in part), name))
    index = {
        "metadata": {"total_size": sum(nbytes_of(spec) for spec in specs)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    nbytes, sha = disk.write_new(folder / INDEX, [json.dumps(index, indent=2).encode()])
    return [*blobs, Blob(INDEX, nbytes, sha, "index")]


def model_files(folder: Path) -> list[Path]:
    """The files of a model folder that are not weights: config, tokenizer, chat template, ...

    Raises `InvalidInput` when `folder` is no folder.
    """
    if not folder.is_dir():
        raise InvalidInput(f"model_files {folder} is not a folder", hint="give the folder with config.json")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and path.name not in {"manifest.json", "owner.json", "decided.json"}
        and path.stat().st_size <= _MAX_MODEL_FILE
    ]


def weight_files(path: Path) -> list[Path]:
    """The safetensors files behind a file or Hugging Face folder. Raises `InvalidInput` that says what is
    missing.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise InvalidInput(
            f"there is no file or folder {path}", hint="give a safetensors file or model folder"
        )
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise InvalidInput(
            f"{path} holds {len(found)} safetensors files and no {INDEX}",
            hint="name one file, or add the index that says which tensor is where",
        )
    raise InvalidInput(
        f"{path} holds no weights (no {SINGLE}, no {INDEX})",
        hint="give a folder that save_pretrained(safe_serialization=True) wrote",
    )


def _indexed(folder: Path) -> list[Path]:
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
    except msgspec.DecodeError as error:
        raise FormatError(f"{folder / INDEX}: {error}", hint="write the folder again") from None
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise InvalidInput(
                f"{folder / INDEX} names {name!r}, which is not in the folder", hint="fetch the missing shard"
            )
    return [folder / name for name in names]


def load_path(path: Path) -> dict[str, Any]:
    """Name -> mapped array, of a file or folder. Raises `InvalidInput`, `FormatError`."""
    out: dict[str, Any] = {}
    for file in weight_files(path):
        for name, array in files.map_file(file).items():
            if name in out:
                raise InvalidInput(
                    f"tensor {name!r} is in two files of {path}",
                    hint="remove the stale shards from the folder",
                )
            out[name] = array
    return out


def copy_model_files(disk: Disk, sources: Sequence[Path], folder: Path) -> Iterator[Blob]:
    """Copy config and tokenizer files into `folder`."""
    for source in sources:
        nbytes, sha = disk.copy_new(source, folder / source.name)
        yield Blob(source.name, nbytes, sha, "model_file")
