"""`weightline audit`: verdicts on rollout files that a real engine wrote, and on forged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store of three versions with the model's files, and greedy outputs of transformers' own model under
    swaps."""
    import numpy as np
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, DynamicCache

    import weightline as wl
    from weightline.demo.models import tiny_model

    root = tmp_path_factory.mktemp("audit-cli")
    folder = tiny_model(root / "model", dtype="F32")
    weights = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    models, lines = {}, []
    with wl.CheckpointEngine(storage_path=root / "store") as line:
        for version in (1, 2, 3):
            if version > 1:
                weights = {
                    n: (a + (rng.standard_normal(a.shape) * 0.05).astype(a.dtype)) if a.ndim > 1 else a
                    for n, a in weights.items()
                }
            line.commit(weights, model_files=folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            state = {n: torch.from_numpy(a.astype(np.float32)) for n, a in weights.items()}
            model.load_state_dict(state)
            models[version] = model
        labels = {r.version: r.label for r in line.versions()}
        run = line.run
    for number in range(3):
        prompt = [5, 17, 200 + number, 33, 90]
        context, cache, new = list(prompt), DynamicCache(), list(prompt)
        for i in range(16):
            with torch.inference_mode():
                out = models[1 + (i >= 6) + (i >= 11)](torch.tensor([new]), cache=cache, use_cache=True)
            new = [int(out.logits[0, -1].argmax())]
            context += new
        spans = [(labels[1], 0, 6), (labels[2], 6, 11), (labels[3], 11, 16)]
        choice = {
            "token_ids": context[len(prompt) :],
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        }
        lines.append(
            {
                "run": run,
                "request_id": f"r{number}",
                "prompt_token_ids": prompt,
                "sampling": {"temperature": 0},
                "choices": [choice],
            }
        )
    return root, lines


def audit(run_weightline: Any, world: Any, tmp_path: Path, lines: list[Any], *more: Any) -> Any:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_weightline("audit", world[0] / "store", file, *more)


def test_true_labels_are_proved_with_the_configuration_out_of_the_store(
    run_weightline: Any, world: Any, tmp_path: Path
) -> None:
    outcome = audit(run_weightline, world, tmp_path, world[1], "--json")
    assert outcome.code == 0, outcome.err
    report = outcome.json()
    assert report["verdict"] == "proved"
    assert (report["requests"], report["tokens_checked"], report["mismatches"]) == (3, 48, 0)
    assert {tally["tokens"] for tally in report["by_version"].values()} == {15, 18}
    assert report["control"]["mismatches"] > 5
    said = audit(run_weightline, world, tmp_path, world[1], "--requests", 2)
    assert "proved: 32 tokens come out again under their labels (2 requests)" in said.out


def test_a_boundary_one_token_off_is_refuted_by_request_and_token(
    run_weightline: Any, world: Any, tmp_path: Path
) -> None:
    lines = json.loads(json.dumps(world[1]))
    for line in lines:
        spans = line["choices"][0]["weight_versions"]
        spans[0]["end"] = spans[1]["start"] = 9
    outcome = audit(run_weightline, world, tmp_path, lines)
    assert outcome.code == 9
    assert "refuted" in outcome.out
    assert "another token is likelier under 1@" in outcome.out


def test_a_label_of_no_version_is_refuted(run_weightline: Any, world: Any, tmp_path: Path) -> None:
    lines = json.loads(json.dumps(world[1][:1]))
    lines[0]["choices"][0]["weight_versions"][2]["version"] = "4@deadbeef"
    outcome = audit(run_weightline, world, tmp_path, lines, "--json")
    assert outcome.code == 9
    assert outcome.json()["verdict"] == "refuted"
    assert outcome.json()["why"] == "request r0, token 11: no version of the run has this label"


def test_what_was_sampled_at_random_is_undecided(run_weightline: Any, world: Any, tmp_path: Path) -> None:
    lines = [{**line, "sampling": {"temperature": 1.0}} for line in world[1]]
    outcome = audit(run_weightline, world, tmp_path, lines, "--json")
    assert outcome.code == 1
    assert outcome.json()["verdict"] == "undecided"


def test_versions_that_sample_the_same_tokens_are_undecided(
    run_weightline: Any, world: Any, tmp_path: Path
) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    import weightline as wl

    weights = load_file(world[0] / "model" / "model.safetensors")
    with wl.CheckpointEngine(storage_path=tmp_path / "store") as line:
        line.commit(weights, model_files=world[0] / "model")
        # One unit in the last place of one element: no token hangs on it.
        name = "model.layers.1.self_attn.k_proj.weight"
        nudged = weights[name].copy()
        nudged.view(np.uint32).reshape(-1)[0] ^= 1
        line.commit({**weights, name: nudged})
        labels, run = {r.version: r.label for r in line.versions()}, line.run
    choice = world[1][0]["choices"][0]
    spans = [(labels[1], 0, 3), (labels[2], 3, 6)]
    choice = {
        "token_ids": choice["token_ids"][:6],
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
    }
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps({**world[1][0], "run": run, "choices": [choice]}))
    outcome = run_weightline("audit", tmp_path / "store", file, "--json")
    assert outcome.code == 1, outcome.err
    assert outcome.json()["verdict"] == "undecided"
    assert "sample the same tokens" in outcome.json()["why"]


def test_bad_input_is_refused_by_name(
    run_weightline: Any, world: Any, tmp_path: Path, save_weights: Any
) -> None:
    import numpy as np

    outcome = run_weightline("audit", world[0] / "store", tmp_path / "none.jsonl")
    assert outcome.code == 2
    assert "none.jsonl" in outcome.err
    plain = save_weights("w.safetensors", {"w": np.zeros(8, np.float32)})
    assert run_weightline("commit", tmp_path / "plain", plain).code == 0
    outcome = audit(run_weightline, (tmp_path / "x",), tmp_path, world[1])
    assert outcome.code == 3
    outcome = run_weightline("audit", tmp_path / "plain", tmp_path / "rollouts.jsonl")
    assert outcome.code == 2
    assert "no version carries the model's config.json" in outcome.err
    assert "--model DIR" in outcome.err
