"""Loads groups of whole modules through vLLM's layerwise reload, limited to these modules, and asks them
afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weightline.plugins.bits import NAMES
from weightline.plugins.exchange import Refused
from weightline.plugins.groups import Group

COLUMNS = 3
"""Columns of a linear that are compared with the loader's input after a load."""


class _Part:
    """Some modules of a model, in the form in which vLLM's layerwise reload asks for them."""

    def __init__(self, model: Any, paths: Iterable[str]) -> None:
        self._found = [model.get_submodule(path) for path in paths]

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._found)


class WholeLoader:
    """Loads groups. `missing` says why this vLLM cannot; empty when it can."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        self.model, self.config = model, vllm_config
        self.missing = ""
        try:
            from vllm.model_executor.model_loader.reload import layerwise
        except ImportError as error:
            self.missing = f"this vLLM has no layerwise reload ({error})"
            return
        for name in ("initialize_layerwise_reload", "finalize_layerwise_processing", "get_layerwise_info"):
            if not hasattr(layerwise, name):
                self.missing = f"this vLLM's layerwise reload lacks {name}"
        self._layerwise = layerwise

    def dtypes(self, group: Group) -> set[str]:
        """dtypes of the parameters into which the loaders of `group` write."""
        found = set()
        for path in group.modules:
            info = self._layerwise.get_layerwise_info(self.model.get_submodule(path))
            found |= {
                NAMES[t.dtype] for kept in info.restore_metadata for t in kept.values() if t.dtype in NAMES
            }
        return found

    @torch.no_grad()
    def load(self, groups: list[Group], tensors: Mapping[str, torch.Tensor]) -> None:
        """Bring the modules of `groups` to `tensors`, which must be all of their names, and ask them.

        Raises `Refused("unknown")` (the modules then hold neither the old nor the new weights for sure).
        """
        from vllm.config import set_current_vllm_config

        names = set().union(*(group.names for group in groups))
        if names != set(tensors):
            left = sorted(names ^ set(tensors))
            raise Refused(f"not whole modules: {', '.join(left[:4])} missing or too many", state="unknown")
        paths = sorted(set().union(*(group.modules | group.owners for group in groups)))
        part = _Part(self.model, paths)
        again = sorted(set().union(*(group.twins for group in groups)))
        witness = _Witness(self.model, [*paths, *again])
        with set_current_vllm_config(self.config), witness.listening():
            self._layerwise.initialize_layerwise_reload(part)
            try:
                self.model.load_weights(iter(tensors.items()))
            finally:
                # Also after a failure: no parameter may stay on the meta device.
                self._layerwise.finalize_layerwise_processing(part, self.config.model_config)
            for path in again:
                twin = self.model.get_submodule(path)
                method = getattr(twin, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(twin)
        hollow = [p for p in paths if any(t.is_meta for t in self.model.get_submodule(p).parameters(False))]
        if hollow:
            raise Refused(f"{', '.join(hollow[:4])}: a parameter got no weights", state="unknown")
        wrong = witness.contradictions()
        if wrong:
            raise Refused(
                f"{', '.join(wrong[:4])} does not compute with what was loaded",
                state="unknown",
                hint="serve this model unquantised and unpacked",
            )


class _Witness:
    """Notes columns of the weights that linears are about to process, and compares answers afterwards."""

    def __init__(self, model: Any, paths: list[str]) -> None:
        self._modules = {path: model.get_submodule(path) for path in paths}
        self._columns: dict[str, list[tuple[int, torch.Tensor]]] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for path, module in self._modules.items():
                method = getattr(module, "quant_method", None)
                if type(method).__name__.startswith("Unquantized") and hasattr(method, "apply"):
                    undo.callback(self._listen(path, module, method))
            yield

    def _listen(self, path: str, module: Any, method: Any) -> Callable[[], None]:
        process = method.process_weights_after_loading
        before = vars(method).get("process_weights_after_loading")

        def listened(layer: Any) -> None:
            weight = getattr(layer, "weight", None)
            # 0 * inf would spoil every answer: such a weight is not asked for.
            plain = isinstance(weight, torch.Tensor) and weight.ndim == 2 and bool(weight.isfinite().all())
            if layer is module and weight is not None and plain:
                width = weight.shape[1]
                picked = sorted({0, width // 2, width - 1})[:COLUMNS]
                self._columns[path] = [(k, weight.detach()[:, k].clone()) for k in picked]
            process(layer)

        method.process_weights_after_loading = listened

        def back() -> None:
            if before is None:
                del method.process_weights_after_loading
            else:
                method.process_weights_after_loading = before

        return back

    def contradictions(self) -> list[str]:
        """Paths of linears whose answer to a unit vector is not the column that was loaded."""
        found = []
        for path, columns in self._columns.items():
            module = self._modules[path]
            for k, column in columns:
                # The last column is always among those picked.
                unit = torch.zeros(1, columns[-1][0] + 1, dtype=column.dtype, device=column.device)
                unit[0, k] = 1.0
                # 1 * w + 0 * rest is exact in every order of summation; + 0.0 makes -0.0 plain.
                answer = module.quant_method.apply(module, unit, None)[0].to(column.dtype)
                if not torch.equal(answer + 0.0, column + 0.0):
                    found.append(path)
                    break
        return found
