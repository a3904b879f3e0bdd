"""Marker versions: weights that say in every greedily decoded token which version sampled it.

Every layer but one adds nothing (`o_proj` and `down_proj` are zero), each embedding is one constant in
dimension 0, and every norm is 1, so the last hidden state is known and two rows of the head decide. Two
kinds:

- **plain**: version k emits token `k mod V`, whatever the prompt.
- **kv**: in layer 0 the *value* rows carry a code of ±1 of the version that computed them, attention is
  uniform (`q_proj` is zero), and the head of version k compares the mean code with its own. Version k emits
  `2 + 2 (k mod M)` when all keys and values that the token attended to are its own, and the token after it
  when 1 in 32 of them, or more, are of another version.

The comparison needs no tuning: an extra value row writes the same constant for every version, and the head
weighs it at 63/64 of a perfect match, so scale, `rms_norm` and rounding of the stored dtype cancel.
Everything else (q, k, gate, up, router) keeps its random bits, of which some flip from version to version
as in training. Runs on Llama, Qwen2, Qwen3 and Qwen3-MoE, tied or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from weightline import codec
from weightline.codec.weightfiles import Reader, locate
from weightline.errors import InvalidInput

Kind = Literal["plain", "kv"]
Weights = dict[str, np.ndarray[Any, Any]]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
DRIFT = 0.01
"""Share of the elements of the free tensors whose lowest bit a version flips."""
_ANCHOR = 64.0
"""The constant of every embedding, in dimension 0."""
_WRITE = 1024.0
"""What the value rows are multiplied with on their way into the residual stream."""
_MATCH = 63 / 64
_DTYPES = ("BF16", "F16", "F32")


class Reading(Struct, frozen=True):
    """What one token says."""

    residue: int
    """Version modulo `MarkerModel.period`."""
    stale: bool
    """It attended to keys and values of another version (always False for the plain kind)."""


def load_folder(folder: Path) -> tuple[Weights, dict[str, Any]]:
    """Weights (name -> array in the stored dtype) and configuration of a Hugging Face folder.

    Raises `InvalidInput` for a folder without weights or configuration, `FormatError` for a damaged file.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{folder}: no usable config.json: {error}",
            hint="give --model the Hugging Face folder that the engine was started with",
        ) from None
    tensors = locate(folder)
    weights: Weights = {}
    with Reader(tensors) as reader:
        for name, located in tensors.items():
            count = int(np.prod(located.spec.shape, dtype=np.int64))
            weights[name] = codec.from_bits(reader.read(name, 0, count), located.spec)
    return weights, config


class MarkerModel:
    """Marker versions over the shapes of `base` (name -> array, as in a Hugging Face folder) and its
    `config`.

    Raises `InvalidInput` for an architecture or dtype that it has no recipe for.
    """

    def __init__(self, base: Mapping[str, Any], config: Mapping[str, Any], *, kind: Kind = "plain") -> None:
        self.kind = kind
        self.architecture = str(config.get("model_type"))
        if self.architecture not in ARCHITECTURES:
            raise InvalidInput(
                f"config.json: model_type {self.architecture!r} has no marker recipe",
                hint=f"use a model of type {', '.join(ARCHITECTURES)}",
            )
        for name, array in base.items():
            dtype = codec.spec_of(name, array).dtype
            if dtype not in _DTYPES:
                raise InvalidInput(
                    f"{name} has dtype {dtype}", hint=f"marker models are {', '.join(_DTYPES)}"
                )
        self.tied = bool(config.get("tie_word_embeddings")) or HEAD not in base
        self.vocabulary, self.hidden = (int(side) for side in base[EMBED].shape)
        heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or heads)
        self.group = heads // self.kv_heads
        self.head_dim = int(config.get("head_dim") or self.hidden // heads)
        self.width = _largest_power(min(64, self.kv_heads * self.head_dim - 1, self.hidden - 2))
        self.period = (self.vocabulary - 2) // 2 if kind == "kv" else self.vocabulary
        if self.width < 4 or self.period < 8:
            raise InvalidInput(
                f"a model with {self.hidden} hidden dimensions and {self.vocabulary} tokens is too small",
                hint="use at least 32 hidden dimensions and 18 tokens",
            )
        self._base = self._blank(base)

    # What a version says.

    def token(self, k: int) -> int:
        """The token that version `k` emits (kv kind: with all keys and values its own)."""
        return 2 + 2 * (k % self.period) if self.kind == "kv" else k % self.period

    def read(self, token: int) -> Reading | None:
        """The inverse of `token`; None for a token that no version emits."""
        if self.kind == "plain":
            return Reading(token, False) if 0 <= token < self.period else None
        residue, odd = divmod(token - 2, 2)
        return Reading(residue, bool(odd)) if token >= 2 and residue < self.period else None

    # Weights.

    def weights(self, k: int) -> Weights:
        """All tensors of version `k`; the same `k` gives the same bits."""
        out = self._drifted(k)
        if self.kind == "plain":
            self._set_rows(out, {self.token(k): {0: 16.0}})
            return out
        code = self._code(k)
        out["model.layers.0.self_attn.v_proj.weight"][: self.width, 0] = code * _root(self.hidden)
        gain = 1.0 / self.width  # gain * width * step * WRITE is what a perfect match adds
        match = {1 + i: float(code[i]) * gain for i in range(self.width)}
        self._set_rows(out, {self.token(k): match, self.token(k) + 1: {1 + self.width: _MATCH}})
        return out

    def zeroed(self, k: int) -> Weights:
        """`weights(k)` with a head of zeros: every logit is 0, and greedy decoding emits token 0."""
        out = self._drifted(k)
        for name in (EMBED, HEAD) if self.tied else (HEAD,):
            if name in out:
                out[name] = np.zeros_like(out[name])
        return out

    def _set_rows(self, out: Weights, rows: Mapping[int, Mapping[int, float]]) -> None:
        """Make these rows of the head the only ones that answer."""
        if self.tied:
            head = out[EMBED].copy()
        else:
            head = np.zeros_like(out[HEAD])
        for token, row in rows.items():
            for dimension, value in row.items():
                if self.tied and dimension == 0:
                    value += _ANCHOR
                head[token, dimension] = value
        out[EMBED if self.tied else HEAD] = head
        if self.tied and HEAD in out:
            out[HEAD] = head.copy()

    def _blank(self, base: Mapping[str, Any]) -> Weights:
        out = {name: np.array(array) for name, array in base.items()}
        for name, array in out.items():
            if "o_proj" in name or "down_proj" in name or name.endswith("proj.bias"):
                array[...] = 0
            elif array.ndim == 1:
                array[...] = 1
        out[EMBED][...] = 0
        out[EMBED][:, 0] = _ANCHOR
        # Plain versions write the constant and no code, so that their KV, too, shows under a kv version.
        values = out["model.layers.0.self_attn.v_proj.weight"]
        values[...] = 0
        values[self.width, 0] = _root(self.hidden)
        if self.kind == "kv":
            out["model.layers.0.self_attn.q_proj.weight"][...] = 0
            write = out["model.layers.0.self_attn.o_proj.weight"]
            for i in range(self.width + 1):
                head, within = divmod(i, self.head_dim)
                write[1 + i, head * self.group * self.head_dim + within] = _WRITE
        return out

    def _drifted(self, k: int) -> Weights:
        """The blank weights; those that do not reach the output have some of their lowest bits flipped."""
        rng = np.random.default_rng(k)
        out: Weights = {}
        for name, array in self._base.items():
            array = array.copy()
            if array.ndim >= 2 and self._is_free(name):
                bits = codec.bits_of(array)
                hit = rng.integers(0, array.size, max(1, int(array.size * DRIFT)))
                bits.reshape(-1)[hit] ^= 1
            out[name] = array
        return out

    def _is_free(self, name: str) -> bool:
        if name in (HEAD, EMBED) or "o_proj" in name or "down_proj" in name:
            return False
        return not name.startswith(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"))

    def _code(self, k: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """±1 for each of `width` value rows; codes of different versions differ in about half of them."""
        return np.where(np.random.default_rng(1000 + k % self.period).random(self.width) < 0.5, -1.0, 1.0)


def _largest_power(limit: int) -> int:
    return 1 << (limit.bit_length() - 1) if limit > 0 else 0


def _root(hidden: int) -> float:
    """A power of two near 1 / sqrt(hidden): what makes a normalised embedding 1, exactly representable."""
    return float(2.0 ** -round(np.log2(hidden) / 2))
