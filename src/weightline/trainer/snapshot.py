"""One immutable picture of live weights in their stored dtypes, taken in one pass into buffers that are used
again."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from weightline.codec import parse_dtype
from weightline.errors import InvalidInput

if TYPE_CHECKING:
    import torch

# bf16 reaches as far as fp32 (it overflows above 3.39e38 only); these do not, so a cast to them is checked.
_NARROW_RANGE = frozenset({"F16", "F8_E4M3", "F8_E5M2"})


class CastPolicy:
    """Which dtype each tensor is stored in: one for all floating-point tensors, with exceptions by name.

    `dtype` is a dtype name ("BF16", "bfloat16", …) or None, which keeps every tensor's own. `exceptions` maps
    a name, or a pattern such as "*.e_score_correction_bias", to a dtype; the first match counts. Integer and
    boolean tensors are never cast. Raises `InvalidInput` for an unknown dtype and, in `resolve`, for an
    exception that matches no tensor.
    """

    def __init__(self, dtype: str | None = "BF16", exceptions: Mapping[str, str] | None = None) -> None:
        self.dtype = None if dtype is None else parse_dtype(dtype)
        self.exceptions = {pattern: parse_dtype(name) for pattern, name in (exceptions or {}).items()}

    def resolve(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
        """Name -> stored `torch.dtype`."""
        unused = set(self.exceptions)
        result: dict[str, torch.dtype] = {}
        for name, tensor in tensors.items():
            pattern = next((p for p in self.exceptions if fnmatchcase(name, p)), None)
            unused.discard(pattern or "")
            wanted = self.exceptions[pattern] if pattern is not None else self.dtype
            if wanted is None or not tensor.dtype.is_floating_point:
                result[name] = tensor.dtype
            else:
                result[name] = torch_dtype(wanted)
        if unused:
            raise InvalidInput(
                f"dtype exception {min(unused)!r} matches no tensor",
                hint="names are plain Hugging Face names; patterns are those of fnmatch",
            )
        return result


class Snapshot:
    """Buffers for one picture. `take` fills them; they stay as they are until the next `take`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], policy: CastPolicy) -> None:
        import torch

        dtypes = policy.resolve(tensors)
        self.buffers: dict[str, torch.Tensor] = {
            name: torch.zeros(tensor.shape, dtype=dtypes[name]) for name, tensor in tensors.items()
        }
        self.nbytes = sum(b.numel() * b.element_size() for b in self.buffers.values())

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cast every tensor into its buffer, rounding to nearest even, and return the buffers.

        Signs of zero and NaNs are kept. Raises `InvalidInput`, naming the tensor, when names or shapes differ
        from those that the buffers were made for, or when a finite value does not fit the stored dtype (fp16,
        fp8).
        """
        import torch

        missing, unknown = self.buffers.keys() - tensors.keys(), tensors.keys() - self.buffers.keys()
        if missing or unknown:
            raise InvalidInput(
                f"the model's tensors changed: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}",
                hint="make a new Committer after the model was changed; its first commit must be an anchor",
            )
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                tensor = tensors[name]
                if tensor.shape != buffer.shape:
                    raise InvalidInput(
                        f"tensor {name}: shape {tuple(tensor.shape)} was {tuple(buffer.shape)}",
                        hint="make a new Committer after the model was changed",
                    )
                buffer.copy_(tensor)
                if dtype_name(buffer.dtype) in _NARROW_RANGE:
                    _check_range(name, tensor, buffer)
        return self.buffers


def torch_dtype(name: str) -> torch.dtype:
    """The `torch.dtype` of a safetensors dtype name. Raises `InvalidInput` when torch has none."""
    import torch

    found = _TORCH_NAMES.get(name)
    dtype = getattr(torch, found, None) if found else None
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"dtype {name}: torch has no such dtype", hint="use BF16, F16 or F32")
    return dtype


_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
_NAMES_OF_TORCH = {f"torch.{torch_name}": name for name, torch_name in _TORCH_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a `torch.dtype`. Raises `InvalidInput` when it has none."""
    try:
        return _NAMES_OF_TORCH[str(dtype)]
    except KeyError:
        raise InvalidInput(f"dtype {dtype} cannot be stored", hint="cast the tensor first") from None


def _check_range(name: str, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    import torch

    over = ~torch.isfinite(buffer.float())
    if dtype_name(buffer.dtype) == "F8_E4M3":
        # It has no infinity and torch saturates; 464 is the last value that still rounds down to the largest,
        # 448.
        over |= tensor.abs() > 464
    over &= torch.isfinite(tensor)
    if bool(over.any()):
        at = int(over.flatten().nonzero()[0])
        raise InvalidInput(
            f"tensor {name}: {float(tensor.flatten()[at])!r} at element {at} "
            f"overflows {dtype_name(buffer.dtype)}",
            hint="store this tensor in BF16 or F32 (dtype_exceptions), or scale it; nothing was committed",
        )
