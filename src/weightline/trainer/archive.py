"""One safetensors file, written tensor by tensor and read back into memory of its own: never all at once,
never mapped.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, tensor
bytes).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from weightline.codec import parse_dtype
from weightline.errors import FormatError, InvalidInput, StorageFull
from weightline.trainer.snapshot import torch_dtype

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100 << 20
"""What safetensors readers accept, in bytes."""
_CHUNK = 16 << 20
_DAMAGED = "the file is cut short or damaged; recover from another version"


def write_archive(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """Write `tensors` and `metadata` to `path` under a temporary name, fsync, rename; the number of bytes.

    At most one tensor is copied at a time, and only when it is not contiguous or not on the CPU. Raises
    `StorageFull` (nothing is left behind) and `InvalidInput` for a tensor that safetensors cannot hold.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise InvalidInput(f"tensor {name}: the name is reserved", hint="rename it")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": parse_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise InvalidInput(
            f"{path}: a header of {len(text)} bytes cannot be read back", hint="save fewer tensors"
        )
    with _replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            view = _bytes(tensor.detach().to("cpu").contiguous())
            for start in range(0, len(view), _CHUNK):
                file.write(view[start : start + _CHUNK])
    return 8 + len(text) + offset


class Archive:
    """An open archive: `metadata`, `specs` (name -> dtype, shape, first byte), and tensors one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `FormatError` unless the header is sound and the file is exactly as long as it says."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except FileNotFoundError:
            raise InvalidInput(f"{path}: no such file", hint="give the path of a saved state") from None
        try:
            self.metadata, self.specs = self._header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own. Raises `FormatError` when the archive has no such tensor."""
        import torch

        if name not in self.specs:
            raise FormatError(f"{self.path}: no tensor {name}", hint=_DAMAGED)
        dtype, shape, start = self.specs[name]
        tensor = torch.empty(shape, dtype=torch_dtype(dtype))
        view = _bytes(tensor)
        self._file.seek(start)
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])  # type: ignore[attr-defined]
            if not count:
                raise FormatError(f"{self.path}: ends within tensor {name}", hint=_DAMAGED)
            filled += count
        return tensor

    def _header(self) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], int]]]:
        size = os.fstat(self._file.fileno()).st_size
        start = self._file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise FormatError(f"{self.path}: no safetensors header", hint=_DAMAGED)
        try:
            header = json.loads(self._file.read(length))
            metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            entries = [
                (name, str(e["dtype"]), tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
                for name, e in header.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self.path}: the header cannot be read: {error}", hint=_DAMAGED) from error
        specs: dict[str, tuple[str, tuple[int, ...], int]] = {}
        end = 0
        for name, dtype, shape, first, last in sorted(entries, key=lambda e: (e[3], e[4])):
            if first != end or last - first != _nbytes(dtype, shape):
                raise FormatError(f"{self.path}: tensor {name} has impossible offsets", hint=_DAMAGED)
            specs[name] = (dtype, shape, 8 + length + first)
            end = last
        if 8 + length + end != size:
            raise FormatError(f"{self.path}: {size} bytes, its header says {8 + length + end}", hint=_DAMAGED)
        return metadata, specs


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    if any(side < 0 for side in shape):
        return -1
    count = 1
    for side in shape:
        count *= side
    return count * torch_dtype(dtype).itemsize


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; a write to the view is a write to the tensor."""
    import torch

    if not tensor.numel():
        return memoryview(bytearray())
    # A single element may have any stride and still count as contiguous: say it plainly.
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageFull(
            f"{path}: cannot be written: {error.strerror or error}", hint="free space and save again"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
