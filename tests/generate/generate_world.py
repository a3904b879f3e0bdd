"""What the engine's tests share. torch is imported inside functions, so that collecting works without it.

A *marker version* k emits token k whenever it decodes greedily, whatever the context: coordinate 0 of the
residual stream is the same positive number at every position (each embedding has it, and no layer writes
there), and only row k of the head looks at it. The rest of the model is a real, random transformer, so keys
and values are real too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weightline import codec
from weightline.types import WeightVersionSpan

VOCAB = 97
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
Weights = dict[str, Any]


def build_model(
    folder: Path,
    arch: str = "qwen3",
    *,
    tie: bool = False,
    dtype: str = "bfloat16",
    marker: bool = False,
    eos: int | None = None,
    layers: int = 2,
    hidden: int = 32,
) -> Path:
    """A random model of some tens of thousands of parameters. With `marker` it is marker version 0."""
    import torch
    import transformers as hf

    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if arch == "qwen3_moe":
        common |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = {
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM),
    }
    config, kind = kinds[arch]
    model = kind(config(**common))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                wide = "embed" in name or "lm_head" in name
                parameter.normal_(0, 0.5 if wide else 0.25)
        if marker:
            _make_marker(model, tie)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _make_marker(model: Any, tie: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter[0] = 0
    model.model.embed_tokens.weight[:, 1:] *= 0.1
    model.model.embed_tokens.weight[:, 0] = 4.0
    if tie:
        model.model.embed_tokens.weight[0, 0] = 12.0
    else:
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[0, 0] = 64.0


def load_weights(folder: Path) -> Weights:
    """Name -> numpy array of everything in a folder."""
    from safetensors import safe_open

    weights: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                weights[name] = codec.from_bits(codec.bits_of(tensor).copy(), codec.spec_of(name, tensor))
    return weights


def save_weights(folder: Path, weights: Weights, out: Path) -> Path:
    """A model folder like `folder`, with these bf16 weights."""
    import shutil

    import torch
    from safetensors.torch import save_file

    out.mkdir()
    shutil.copy(folder / "config.json", out)
    save_file(
        {
            n: torch.from_numpy(codec.bits_of(a).copy().view(np.int16)).view(torch.bfloat16).reshape(a.shape)
            for n, a in weights.items()
        },
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    return out


def marker_weights(base: Weights, k: int) -> Weights:
    """Marker version k of a marker model's weights."""
    tied = HEAD not in base
    name = EMBED if tied else HEAD
    changed = base[name].copy()
    changed[:, 0] = 4.0 if tied else 0.0
    changed[k % VOCAB, 0] = 12.0 if tied else 64.0
    return {**base, name: changed}


def digests_of(weights: Mapping[str, Any]) -> dict[str, str]:
    return {name: codec.digest_of(codec.bits_of(array)) for name, array in weights.items()}


class Versions:
    """A line of versions for one engine: writes delta files and drives refits the way a follower does, in
    process.
    """

    def __init__(self, folder: Path, files: Path, *, run: str = "run-1") -> None:
        self.files = files
        self.run = run
        self.weights: dict[str, Weights] = {"default": load_weights(folder)}
        self.made = 0

    def order(self, new: Weights, *, label: str, version: int, base: Any = None, **changes: Any) -> Any:
        """A refit order. `base` is (version, label) of a delta's base, or None for a full refit."""
        from weightline.generate.wire import RefitOrder

        self.made += 1
        path = self.files / f"{self.made}.safetensors"
        if base is None:
            delta = codec.full(new)
        else:
            old = self.weights[base[1]]
            delta = codec.diff(old, new)
        codec.write_delta(delta, path)
        self.weights[label] = new
        fields: dict[str, Any] = {
            "run": self.run,
            "version": version,
            "label": label,
            "have": None if base is None else base[0],
            "have_label": None if base is None else base[1],
            "file": str(path),
            "digests": {name: digest for name, digest in digests_of(new).items() if name in delta.changed},
            "holder": "tests",
        }
        return RefitOrder(**{**fields, **changes})

    def refit(self, engine: Any, new: Weights, *, label: str, version: int) -> None:
        """Full life of a refit, from any thread but the engine's; the engine is paused already and stays
        so.
        """
        live = engine.identity
        base = None if live.version is None else (live.version, live.label)
        session, _ = engine.prepare(self.order(new, label=label, version=version, base=base))
        for verb in ("apply", "verify", "label", "close"):
            engine.call(lambda verb=verb: getattr(engine.refits, verb)(session))


class Collector:
    """Sink of one request: what every sequence brought, and a way to wait."""

    def __init__(self, sequences: int = 1) -> None:
        self.chunks: list[Any] = []
        self.finals: dict[int, Any] = {}
        self.sequences = sequences
        self.done = threading.Event()
        self.on_tokens: dict[int, Callable[[], None]] = {}
        """Number of tokens received (of all sequences) -> what to do then, on the engine thread, within the
        step.
        """
        self.tokens = 0

    def __call__(self, chunk: Any) -> None:
        self.chunks.append(chunk)
        self.tokens += len(chunk.token_ids)
        if chunk.token_ids and (act := self.on_tokens.pop(self.tokens, None)):
            act()
        if chunk.final is not None:
            assert chunk.index not in self.finals, "two terminal chunks for one sequence"
            self.finals[chunk.index] = chunk.final
            if len(self.finals) == self.sequences:
                self.done.set()

    def wait(self) -> Any:
        """The final output of sequence 0, once all sequences have ended."""
        assert self.done.wait(60), "the request did not end"
        return self.finals[0]


def run(engine: Any, prompt: list[int], **sampling: Any) -> Any:
    """Submit and wait; returns the completion of sequence 0."""
    return start(engine, prompt, **sampling).wait()


def start(engine: Any, prompt: list[int], collector: Collector | None = None, **sampling: Any) -> Collector:
    """Submit; greedy and without a stop token unless told otherwise."""
    from weightline.generate import SamplingParams

    request_id = sampling.pop("request_id", "")
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **sampling})
    collector = collector or Collector(params.n)
    engine.submit(prompt, params, collector, request_id=request_id)
    return collector


def open_engine(folder: Path, **options: Any) -> Any:
    """An engine that is not started yet; `clock` may be injected."""
    import torch

    from weightline.generate import Engine, EngineOptions, load_model

    torch.set_num_threads(1)
    clock = {"clock": options.pop("clock")} if "clock" in options else {}
    options = {"max_num_seqs": 4, "max_model_len": 96, "prefill_tokens": 16, **options}
    return Engine(
        load_model(folder, max_model_len=options["max_model_len"]), EngineOptions(**options), **clock
    )


def reference_model(folder: Path) -> Any:
    """transformers' own model, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own generate."""
    import torch

    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(t) for t in out[0, len(prompt) :]]


@contextmanager
def paused_at(collector: Collector, tokens: int, engine: Any, **pause: Any) -> Iterator[None]:
    """The engine pauses right after the step in which the collector's `tokens`-th token comes; the body
    runs while it is paused.
    """
    stopped = threading.Event()

    def stop() -> None:
        from concurrent.futures import Future

        done: Future[None] = Future()
        engine.post(lambda: engine._pause(pause.get("mode", "keep"), pause.get("clear_cache", False), done))
        done.add_done_callback(lambda _: stopped.set())

    collector.on_tokens[tokens] = stop
    yield
    assert stopped.wait(60), f"token {tokens} never came"


def spans(*ranges: tuple[str, int, int]) -> tuple[WeightVersionSpan, ...]:
    return tuple(WeightVersionSpan(version=v, start=a, end=b) for v, a, b in ranges)


def replay(
    model: Any, versions: Mapping[str, Mapping[str, Any]], prompt: list[int], completion: Any
) -> list[float]:
    """Log-probability of every output token, computed anew from the labels alone.

    Before output token i is sampled, keys and values of the last position so far are computed under token
    i's label; at the indexes in `kv_recomputed_at`, those of all positions. `versions` is label -> weights;
    `model` is transformers' own.
    """
    import torch

    from weightline.core.spans import per_token

    logs: list[float] = []
    cache: Any = None
    before = None
    for i, (token, label) in enumerate(
        zip(completion.token_ids, per_token(completion.weight_versions), strict=True)
    ):
        if label != before:
            _load(model, versions[label])
        before = label
        context = prompt + list(completion.token_ids[:i])
        if i == 0 or i in completion.kv_recomputed_at:
            cache, new = None, context
        else:
            new = context[-1:]
        with torch.no_grad():
            out = model(input_ids=torch.tensor([new]), cache=cache, use_cache=True)
        cache = out.cache
        row = out.logits[0, -1].log_softmax(-1)
        logs.append(float(row[token]))
    return logs


def _load(model: Any, weights: Mapping[str, Any]) -> None:
    import torch

    state = {n: torch.from_numpy(np.asarray(a, dtype=np.float32)) for n, a in weights.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
