"""Going on after a crash: weights, optimizer and step of one and the same version, and the right lineage
afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from weightline.errors import FormatError, IntegrityError, InvalidInput
from weightline.trainer.names import live_tensors, named_tensors
from weightline.trainer.snapshot import torch_dtype
from weightline.trainer.state import ATTACHMENT, load_state, saved_parts

if TYPE_CHECKING:
    import torch

    from weightline.service.line import Line


class Resumed(Struct, frozen=True, kw_only=True):
    """Where training goes on."""

    version: int
    """The version that weights and state were taken from; the parent of the next commit."""
    step: int
    newest: int
    """The newest version in the store: the next commit is `newest + 1`. Those after `version` are abandoned
    by it."""
    position: Any
    """The data position that was saved with it."""
    metadata: dict[str, Any]

    @property
    def abandoned(self) -> tuple[int, ...]:
        """Versions that engines may have served and training goes back behind."""
        return tuple(range(self.version + 1, self.newest + 1))


def resume(
    line: Line,
    model: Any,
    optimizer: Any = None,
    *,
    scheduler: Any = None,
    rng: bool = True,
    generators: Mapping[str, Any] | None = None,
    attachment: str = ATTACHMENT,
) -> Resumed:
    """Put `model`, `optimizer` and the rest back to the newest version that has attachments.

    The masters of the state are cast to the stored dtypes and compared, bit for bit, with the version's
    weights: state and weights of different versions never mix. A state without masters takes the weights
    themselves, exactly upcast. The next commit through `line` gets the next number with `Resumed.version` as
    its parent. Raises `VersionNotFound` when no version has attachments, `InvalidInput` when it has none of
    that name or does not fit the model, `IntegrityError`, `FormatError`.
    """
    recovered = line.recover()
    if attachment not in recovered.attachments:
        raise InvalidInput(
            f"version {recovered.version}: no attachment {attachment!r}",
            hint=f"it has {', '.join(sorted(recovered.attachments))}; name one of these",
        )
    path = Path(recovered.attachments[attachment])
    weights = recovered.weights()
    masters = "masters" in saved_parts(path)
    state = load_state(
        path,
        model=model if masters else None,
        optimizer=optimizer,
        scheduler=scheduler,
        rng=rng,
        generators=generators,
    )
    if masters:
        _compare(model, weights, recovered.version)
    else:
        take_weights(model, weights, recovered.version)
    if recovered.step is not None and recovered.step != state.step:
        raise FormatError(
            f"version {recovered.version}: step {recovered.step}, its state says {state.step}",
            hint="pass the same step to save_state and to after_step",
        )
    newest = line.latest() or recovered.version
    return Resumed(
        version=recovered.version,
        step=state.step,
        newest=newest,
        position=state.position,
        metadata=dict(line.record(recovered.version).metadata),
    )


def take_weights(model: Any, weights: Mapping[str, Any], version: int) -> None:
    """Write the weights of `version` (name -> array, as stored) into a live model; a wider dtype takes them
    exactly.

    Raises `InvalidInput` when names or shapes are not the model's; then nothing was written.
    """
    import torch

    with torch.no_grad():
        for tensor, stored in _paired(live_tensors(model), weights, version):
            tensor.copy_(stored)


def _compare(model: Any, weights: Mapping[str, Any], version: int) -> None:
    import torch

    tensors = named_tensors(model)
    for (name, tensor), (_, stored) in zip(
        sorted(tensors.items()), _paired(tensors, weights, version), strict=True
    ):
        cast = tensor.detach().to("cpu", stored.dtype).contiguous()
        if not torch.equal(_bits(cast), _bits(stored)):
            raise IntegrityError(
                f"version {version}: tensor {name} differs from the masters in its attachments",
                hint="the state belongs to another version; resume from another one",
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _paired(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any], version: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Live and stored tensors, in the order of their names, once all names and shapes are known to fit."""
    missing, unknown = sorted(tensors.keys() - weights.keys()), sorted(weights.keys() - tensors.keys())
    if missing or unknown:
        raise InvalidInput(
            f"version {version} is of another model: missing {missing[:5]}, unknown {unknown[:5]}",
            hint="resume with the model that was committed",
        )
    for name in sorted(tensors):
        if tuple(weights[name].shape) != tuple(tensors[name].shape):
            raise InvalidInput(
                f"version {version}: tensor {name} is {list(weights[name].shape)}, "
                f"the model has {list(tensors[name].shape)}",
                hint="resume with the model that was committed",
            )
    return [(tensors[name], _as_torch(weights[name])) for name in sorted(tensors)]


def _as_torch(array: Any) -> torch.Tensor:
    import torch

    return array if isinstance(array, torch.Tensor) else from_numpy(array)


def from_numpy(array: Any) -> torch.Tensor:
    """A torch tensor with the bits, dtype and shape of a numpy or ml_dtypes array, in memory of its own."""
    import torch

    from weightline.codec import bits_of, parse_dtype

    bits = torch.from_numpy(bits_of(array).view("uint8").copy())
    return bits.view(torch_dtype(parse_dtype(array.dtype))).reshape(array.shape)
