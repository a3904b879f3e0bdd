"""The model folder that the engine loaded: names, dtypes, shapes and mapped bits of its safetensors files."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightline.plugins.bits import TORCH, UNSIGNED, width
from weightline.plugins.exchange import Refused


@dataclass(frozen=True)
class Stored:
    """One tensor of the folder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    first: int
    last: int

    def bits(self) -> npt.NDArray[Any]:
        """Mapped, 1-D, unsigned."""
        with self.file.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        kind = np.dtype(UNSIGNED[width(self.dtype)])
        return np.frombuffer(data, kind, (self.last - self.first) // kind.itemsize, self.first)


def find(model: str, revision: str | None = None) -> Path:
    """The folder of a model that the engine was given by path or hub name. Raises `Refused`."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        except Exception as error:  # noqa: BLE001  whatever the hub client raises, the reason is the same to the user
            raise Refused(
                f"the folder of model {model!r} is not on this machine ({type(error).__name__})",
                kind="invalid_input",
                hint="serve a local folder of safetensors files",
            ) from None
    return folder


def read(folder: Path) -> list[Stored]:
    """All tensors of the folder's safetensors files. Raises `Refused` when there are none."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] in TORCH:
                first, last = entry["data_offsets"]
                start = 8 + length
                found[name] = Stored(
                    name, entry["dtype"], tuple(entry["shape"]), path, start + first, start + last
                )
    if not found:
        raise Refused(
            f"{folder}: no safetensors files, so nothing to derive the mapping from",
            kind="invalid_input",
            hint="serve a folder of safetensors files",
        )
    return list(found.values())
