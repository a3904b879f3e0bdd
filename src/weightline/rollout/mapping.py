"""Names: which live tensor of an engine each committed tensor goes to. Decided before any byte moves, against
the engine's real names.

Three differences are bridged, and nothing else:

- wrappers: path segments that training wrappers add (`module`, `_orig_mod`, FSDP's, activation
  checkpointing's, PEFT's `base_layer`), at any depth and in any order, and PEFT's leading `base_model.model`.
  Whole segments only: `my_module.w` is nobody's wrapper.
- nesting: a text model inside a multimodal one, whose names carry a `language_model` segment
  (`model.language_model.layers.0…` or `language_model.model.layers.0…` against `model.layers.0…`).
- ties: a committed name that the engine holds as an alias of another tensor.

A name that fits as it is always wins. Anything left over, doubled or of another shape is an error that lists
every case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from weightline.errors import RefitError
from weightline.rollout.engines.base import EngineDescription
from weightline.types import TensorSpec

WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
)
NESTING = frozenset(("language_model",))

HOLDS: dict[str, frozenset[str]] = {
    "BF16": frozenset(("F8_E4M3", "F8_E5M2")),
    "F16": frozenset(("F8_E4M3", "F8_E5M2")),
    "F32": frozenset(("BF16", "F16", "F8_E4M3", "F8_E5M2")),
    "F64": frozenset(("F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")),
}
"""Live dtype -> other stored dtypes of which it represents every value exactly."""


def strip_wrappers(name: str) -> str:
    """`name` without the segments that wrappers add; the last segment (the parameter's own name) is never
    cut."""
    *path, leaf = name.split(".")
    kept = [segment for segment in path if segment not in WRAPPERS]
    while kept[:2] == ["base_model", "model"]:
        kept = kept[2:]
    return ".".join([*kept, leaf])


def _without_nesting(name: str) -> str:
    *path, leaf = strip_wrappers(name).split(".")
    return ".".join([*(segment for segment in path if segment not in NESTING), leaf])


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for old, new in rules.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


class _Targets:
    """The engine's names, by how closely a committed name must fit."""

    def __init__(self, names: Iterable[str]) -> None:
        self.exact = frozenset(names)
        self.bare: dict[str, list[str]] = defaultdict(list)
        self.flat: dict[str, list[str]] = defaultdict(list)
        for name in self.exact:
            self.bare[strip_wrappers(name)].append(name)
            self.flat[_without_nesting(name)].append(name)

    def candidates(self, name: str) -> list[str]:
        if name in self.exact:
            return [name]
        return self.bare.get(strip_wrappers(name)) or self.flat.get(_without_nesting(name)) or []


def resolve(
    committed: Iterable[TensorSpec], engine: EngineDescription, *, rules: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Committed name -> the engine's name, for every committed tensor.

    `rules`: prefix of a committed name -> what to put in its place, tried first, in order. Raises
    `RefitError("old")` that lists all tensors without a home, all homes that two tensors claim, and all
    shapes and dtypes that do not fit. Two committed names that the engine holds as one tied tensor are both
    kept: that their bytes agree is checked where the bytes are known (`tied_apart`).
    """
    live = {spec.name: spec for spec in engine.tensors}
    targets = _Targets(live)
    mapping: dict[str, str] = {}
    claims: dict[str, list[str]] = defaultdict(list)
    faults: list[str] = []
    for spec in committed:
        found = targets.candidates(_renamed(spec.name, rules or {}))
        if len(found) != 1:
            reason = (
                "fits several of the engine's: " + ", ".join(sorted(found))
                if found
                else "the engine has no such tensor"
            )
            faults.append(f"{spec.name} ({reason})")
            continue
        target = live[found[0]]
        mapping[spec.name] = target.name
        claims[target.name].append(spec.name)
        if target.shape != spec.shape:
            faults.append(f"{spec.name} (shape {list(spec.shape)}, in the engine {list(target.shape)})")
        elif target.dtype != spec.dtype and spec.dtype not in HOLDS.get(target.dtype, ()):
            faults.append(
                f"{spec.name} (stored as {spec.dtype}, the engine's {target.dtype} cannot hold it exactly)"
            )
    faults += [
        f"{name} (claimed by {', '.join(sorted(sources))})"
        for name, sources in sorted(claims.items())
        if len(sources) > 1
    ]
    if faults:
        raise RefitError(
            f"{len(faults)} committed tensors do not fit this engine: {'; '.join(faults)}",
            engine_state="old",
            hint="serve the same architecture that is committed, or give a prefix rule",
        )
    if not mapping:
        raise RefitError("the version names no tensor", engine_state="old", hint="commit a model's weights")
    return mapping


def tied_apart(
    mapping: Mapping[str, str], digests: Mapping[str, str], engine: EngineDescription
) -> list[str]:
    """Committed names that the engine ties into one tensor although the version has different bytes for them.

    `digests`: committed name -> additive digest (equal bits of one shape have equal digests).
    """
    first: dict[str, str] = {}
    apart = []
    for name in sorted(mapping):
        owner = engine.aliases.get(mapping[name], mapping[name])
        other = first.setdefault(owner, name)
        if other != name and digests.get(other) != digests.get(name):
            apart.append(f"{other} and {name}")
    return apart


def uncovered(mapping: Mapping[str, str], engine: EngineDescription) -> tuple[str, ...]:
    """Names of live tensors that no committed tensor goes to, ties counted once: a refit leaves them as they
    are."""
    owners = {engine.aliases.get(name, name) for name in mapping.values()}
    return tuple(sorted(s.name for s in engine.tensors if engine.aliases.get(s.name, s.name) not in owners))
