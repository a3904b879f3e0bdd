"""A transformers model whose weights are replaced by those of one version after the other. torch is imported
late.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightline.errors import InvalidInput
from weightline.service.line import Line

if TYPE_CHECKING:
    import torch


class Replica:
    """One model in float32, filled with exact upcasts of a version's stored bits.

    Holds one set of float32 weights; while a version is loaded its stored form is in memory as well.
    """

    def __init__(self, model_folder: Path) -> None:
        """`model_folder`: a Hugging Face folder; only its configuration is read. Raises `InvalidInput` when
        there is none.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(model_folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InvalidInput(
                f"{model_folder}: no usable config.json: {str(error).splitlines()[0]}",
                hint="give the model folder that the engines were started with",
            ) from error
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model.requires_grad_(False)
        self.model.eval()
        self.vocabulary = int(config.get_text_config().vocab_size)
        parameters = inspect.signature(self.model.forward).parameters
        self._cache_argument = (
            "cache" if "cache" in parameters else "past_key_values"
        )  # renamed in transformers 5
        self.version: int | None = None
        """The version whose weights are in the model."""

    def take(self, line: Line, version: int) -> None:
        """Replace the weights by those of `version`. Does nothing when they are in place already.

        Raises `InvalidInput` when names or shapes are not the model's, and what `line.load` raises. After an
        error no version is in place.
        """
        if self.version == version:
            return
        self.version = None
        weights: dict[str, Any] = line.load(version, like="torch")
        targets: dict[str, Any] = self.model.state_dict(keep_vars=True)
        unknown = sorted(weights.keys() - targets.keys())
        shapes = sorted(n for n in weights.keys() & targets.keys() if weights[n].shape != targets[n].shape)
        filled = {targets[n].data_ptr() for n in weights.keys() & targets.keys()}
        # A tied name shares its storage with one that is stored.
        missing = sorted(n for n, t in targets.items() if n not in weights and t.data_ptr() not in filled)
        for what, names in (
            ("unknown to the model", unknown),
            ("of another shape", shapes),
            ("missing", missing),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise InvalidInput(
                    f"version {version} does not fit the model: {', '.join(names[:3])}{more}: {what}",
                    hint="give the model folder that the engines were started with",
                )
        for name in list(weights):
            targets[name].data.copy_(weights.pop(name))
        self.version = version

    def empty_cache(self) -> Any:
        """Keys and values of no position yet."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def logits(self, tokens: list[int], cache: Any, keep: int) -> torch.Tensor:
        """Logits [keep, vocabulary], float32, at the last `keep` (1 or more) of `tokens`, which come after
        those in `cache`.

        Keys and values of `tokens` are added to `cache`.
        """
        import torch

        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([tokens]),
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_argument: cache},
            )
        logits: torch.Tensor = out.logits[0, -keep:].float()
        return logits
