"""Opening a model folder: transformers' own modules, offline, every way to go wrong named in one line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightline.errors import FormatError, InvalidInput
from weightline.types import TensorSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FOLDER_HINT = (
    "give a Hugging Face folder with config.json and safetensors weights, "
    "for instance the output of `weightline checkout`"
)


class LoadedModel:
    """A causal language model ready to run.

    `module` is transformers' model in eval mode, without gradients; `stored` tells every tensor of the
    folder (name, dtype, shape), `files` where it is; `stop_ids` are the end-of-sequence ids;
    `cache_argument` is the name this transformers gives the cache in `forward`.
    """

    def __init__(
        self,
        folder: Path,
        module: Any,
        stored: dict[str, TensorSpec],
        files: dict[str, Path],
        dtype: torch.dtype,
    ) -> None:
        self.folder = folder
        self.module = module
        self.stored = stored
        self.files = files
        self.dtype = dtype
        self.device = torch.device("cpu")
        config = module.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.layers = int(config.num_hidden_layers)
        self.stop_ids = _stop_ids(module)
        self.cache_argument = (
            "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
        )

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits [batch, vocabulary] at the last of `tokens` ([batch, new]); `positions` has its shape,
        `mask` is additive and 4-D.
        """
        out = self.module(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def compute_dtype(name: str) -> torch.dtype:
    """ "auto" is float32: exact upcasts of what the folder holds, since bf16 arithmetic is far slower on
    CPUs. Raises `InvalidInput`.
    """
    if name == "auto":
        return torch.float32
    try:
        return _DTYPES[name.removeprefix("torch.")]
    except KeyError:
        raise InvalidInput(f"dtype {name!r} is not known", hint=f"use auto, {', '.join(_DTYPES)}") from None


def stored_tensors(folder: Path) -> tuple[dict[str, TensorSpec], dict[str, Path]]:
    """Every tensor in the folder's safetensors files, and the file it is in. Raises `InvalidInput` or
    `FormatError`.
    """
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise InvalidInput(f"model folder {folder} {what}", hint=_FOLDER_HINT)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise FormatError(
                f"{index} has no readable weight_map: {error!r}", hint="write the folder anew"
            ) from error
        paths = [folder / str(name) for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidInput(f"model folder {folder} has no safetensors weights", hint=_FOLDER_HINT)
    specs: dict[str, TensorSpec] = {}
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    specs[name] = TensorSpec(
                        name=name, dtype=str(part.get_dtype()), shape=tuple(part.get_shape())
                    )
                    files[name] = path
        except (SafetensorError, OSError) as error:
            raise FormatError(
                f"{path} is not a whole safetensors file: {error}", hint="fetch or write it again"
            ) from error
    return specs, files


def load_model(folder: Path, *, dtype: str = "auto", max_model_len: int) -> LoadedModel:
    """Load the folder on the CPU. Raises `InvalidInput` (no weights, no causal LM, unsupported attention)
    and `FormatError` (damaged file).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    torch_dtype = compute_dtype(dtype)
    specs, files = stored_tensors(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise InvalidInput(
            f"{folder / 'config.json'} is not understood: {_first_line(error)}", hint=_FOLDER_HINT
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise InvalidInput(
            f"model folder {folder} holds a {config.model_type!r} model, not a causal language model",
            hint="give a decoder-only model such as Llama, Qwen2, Qwen3 or Qwen3-MoE",
        )
    _check_attention(config.get_text_config(), folder, max_model_len)
    transformers_logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch_dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise InvalidInput(
            f"model folder {folder} does not load: {_first_line(error)}", hint=_FOLDER_HINT
        ) from error
    missing = sorted({*report["missing_keys"], *(str(m[0]) for m in report["mismatched_keys"])})
    if missing:
        raise InvalidInput(
            f"model folder {folder} lacks or misshapes {len(missing)} tensors, among them {missing[0]}",
            hint="the folder must hold every weight that its config.json names",
        )
    module.requires_grad_(False)
    module.eval()
    return LoadedModel(folder, module, specs, files, torch_dtype)


def _check_attention(config: Any, folder: Path, max_model_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or (
        not getattr(config, "layer_types", None) and window is not None
    )
    if windowed and window is not None and window >= max_model_len:
        kinds.discard("sliding_attention")
        windowed = False
    if kinds or windowed:
        found = ", ".join(sorted(kinds)) or f"a sliding window of {window}"
        raise InvalidInput(
            f"model folder {folder} uses {found}, which this engine does not run",
            hint="use a model with full attention, or a max_model_len within its sliding window",
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise InvalidInput(
            f"max_model_len {max_model_len} is more than the {limit} positions of {folder}",
            hint=f"use at most {limit}",
        )


def _stop_ids(module: Any) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = module.config.get_text_config().eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list | tuple) else [found])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
