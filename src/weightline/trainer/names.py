"""Which tensors of a live model go into a version, and under which names: those that `save_pretrained` would
write."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from weightline.errors import InvalidInput

WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
)
"""Components that DDP, `torch.compile`, FSDP, activation checkpointing and PEFT put into names; the receiving
side (`rollout.mapping`) takes out the same."""


def plain_name(name: str) -> str:
    """`name` without wrapper components, in any order and at any depth: "_orig_mod.module.layers.0.w" ->
    "layers.0.w".

    Only whole components go ("my_module.w" stays), and the last one, the parameter's own name, always stays.
    PEFT's "base_model.model" goes where it leads the name.
    """
    *path, last = name.split(".")
    kept = [part for part in path if part not in WRAPPERS]
    while kept[:2] == ["base_model", "model"]:
        kept = kept[2:]
    return ".".join([*kept, last])


def plain_names(tensors: Iterable[tuple[str, Any]], *, adapters: bool = False) -> dict[str, Any]:
    """Name -> tensor under plain names. Raises `InvalidInput` when two different names become one, and for a
    tensor of a PEFT adapter unless `adapters` are wanted."""
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors:
        plain = plain_name(name)
        if not adapters and _of_adapter(name):
            raise InvalidInput(
                f"tensor {name} belongs to a PEFT adapter that is not merged into the weights",
                hint="call merge_adapter() before the commit and unmerge_adapter() after it, or commit what "
                "merge_and_unload() of a copy gives",
            )
        if plain in result:
            raise InvalidInput(
                f"tensor {plain}: both {origin[plain]} and {name} come to this name without their wrappers",
                hint="commit a mapping with the names you want",
            )
        result[plain], origin[plain] = tensor, name
    return result


def live_tensors(source: Any, *, adapters: bool = False) -> dict[str, Any]:
    """Name -> live `torch.Tensor`, under plain names; a write to one of them is a write to the model.

    `source` is a `torch.nn.Module` (wrapped or not) or a mapping. Of tensors that share their storage one is
    kept: the one that the model does not declare tied, else the first. What a transformers model ignores on
    save is left out, and so are the tensors of PEFT adapters that are merged into the layers they adapt.
    Raises `InvalidInput` for anything else, for an entry that is not a tensor, and for an adapter that is not
    merged (of a mapping: any). `adapters=True` keeps every adapter's tensors: what a resume needs.
    """
    if isinstance(source, Mapping):
        tensors = plain_names(source.items(), adapters=adapters)
        _check_tensors(tensors)
        return _untie(tensors, {})
    if not hasattr(source, "state_dict"):
        raise InvalidInput(
            f"weights: {type(source).__name__} is neither a torch module nor a mapping",
            hint="give the model, or a mapping of names to tensors",
        )
    model = innermost(source)
    merged = frozenset() if adapters else _merged_layers(source)
    state = source.state_dict(keep_vars=True)
    kept = ((name, tensor) for name, tensor in state.items() if not _lora_in(name, merged))
    tensors = plain_names(kept, adapters=adapters)
    tensors = {name: getattr(t, "data", t) for name, t in tensors.items()}
    for ignored in getattr(model, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(ignored, None)
    _check_tensors(tensors)
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or {}
    return _untie(tensors, dict.fromkeys(tied))


def named_tensors(source: Any) -> dict[str, Any]:
    """Name -> `torch.Tensor` of what a version of `source` holds: names and shapes are those that
    `save_pretrained` writes.

    As `live_tensors`, and what transformers converts when it loads a file (packed experts, say) is converted
    back. Nothing is copied where no conversion is needed.
    """
    tensors = live_tensors(source)
    return tensors if isinstance(source, Mapping) else _stored_form(innermost(source), tensors)


def innermost(model: Any) -> Any:
    """The model inside its wrappers, PEFT's included."""
    while True:
        inner = next((getattr(model, part) for part in sorted(WRAPPERS) if hasattr(model, part)), None)
        if inner is None:
            # Registered children only: transformers has a property `base_model` that is no wrapper.
            adapted = getattr(model, "_modules", {}).get("base_model")
            inner = getattr(adapted, "_modules", {}).get("model")
        if inner is None or inner is model or not hasattr(inner, "state_dict"):
            return model
        model = inner


def _of_adapter(name: str) -> bool:
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def _merged_layers(model: Any) -> frozenset[str]:
    """Plain names of the modules whose adapters PEFT has merged into their `base_layer`."""
    return frozenset(
        plain_name(f"{name}.")
        for name, module in model.named_modules()
        if "base_layer" in module._modules and getattr(module, "merged", False) is True
    )


def _lora_in(name: str, layers: frozenset[str]) -> bool:
    """Whether `name` is a lora tensor of one of `layers`."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), None)
    return at is not None and plain_name(".".join([*parts[:at], ""])) in layers


def _check_tensors(tensors: Mapping[str, Any]) -> None:
    import torch

    wrong = sorted(name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor))
    if wrong:
        raise InvalidInput(
            f"tensor {wrong[0]}: {type(tensors[wrong[0]]).__name__} is not a torch.Tensor",
            hint="leave non-tensor state out of the weights; it belongs into the attachments",
        )


def _untie(tensors: dict[str, Any], tied: Mapping[str, None]) -> dict[str, Any]:
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            view = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            groups.setdefault(view, []).append(name)
    dropped: set[str] = set()
    for names in groups.values():
        keep = next((name for name in names if name not in tied), names[0])
        dropped.update(name for name in names if name != keep)
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}


def _stored_form(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Undo what transformers does to weights on load, so that names and shapes are those of the files."""
    transformers = sys.modules.get("transformers")  # a model of theirs cannot exist before it is imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return stored
