"""See for yourself: does your SGLang label the token that is in flight when it pauses in place?

    python examples/sglang_off_by_one.py http://127.0.0.1:30000 MODEL

MODEL is the Hugging Face folder (safetensors, an untied head) that the server was started with, on this
host. Greedy requests run; the server is paused in place; a copy of the folder whose lm_head is zero is
loaded under a new label over SGLang's own route; the server goes on. From the swap on every token is 0, so
the true boundary is the first token of the all-zero tail. Printed is, for each request that crossed the
swap, its label's boundary minus the truth: 0 is exact, -1 is one token of the old weights under the new
label.

Needs only the standard library, torch and safetensors; weightline's plugin may be there or not. The
server's weights and label are put back at the end. Nobody else should use the server meanwhile.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import shutil
import tempfile
import threading
import time
import urllib.request
from typing import Any

from safetensors.torch import load_file, save_file


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def zeroed_copy(model: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """`model` with a head of zeros: every logit is 0, and greedy decoding emits token 0."""
    shutil.copytree(model, out)
    for path in out.glob("*.safetensors"):
        weights = load_file(path)
        if "lm_head.weight" in weights:
            weights["lm_head.weight"].zero_()
            save_file(weights, path, metadata={"format": "pt"})
            return out
    raise SystemExit(f"{model} has no lm_head.weight: its head is tied, use a model whose is not")


def one_swap(url: str, model: pathlib.Path, zeroed: pathlib.Path, turn: int, tokens: int) -> list[int]:
    """Boundary minus truth of each request that crossed it."""
    post(f"{url}/update_weights_from_disk", {"model_path": str(model), "weight_version": f"whole-{turn}"})
    replies: list[dict[str, Any]] = []

    def generate(number: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": [10 + number, 11, 12, 13], "sampling_params": sampling}
        replies.append(post(f"{url}/generate", body))

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3 + 0.07 * turn)
    post(f"{url}/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(zeroed), "weight_version": f"zeroed-{turn}", "flush_cache": False}
    post(f"{url}/update_weights_from_disk", update)
    post(f"{url}/continue_generation", {"torch_empty_cache": False})
    for thread in threads:
        thread.join()
    errors = []
    for reply in replies:
        ids, spans = reply["output_ids"], reply["meta_info"]["weight_versions"]
        truth = next((k for k in range(len(ids)) if not any(ids[k:])), len(ids))
        if len(spans) > 1:
            errors.append(spans[-1]["start"] - truth)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="e.g. http://127.0.0.1:30000")
    parser.add_argument("model", type=pathlib.Path, help="the folder that the server was started with")
    parser.add_argument("--swaps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=400, help="a request, which must still run at the swap")
    args = parser.parse_args()
    model = args.model.resolve()
    label = post(f"{args.url}/model_info")["weight_version"]
    with tempfile.TemporaryDirectory() as folder:
        zeroed = zeroed_copy(model, pathlib.Path(folder) / "zeroed")
        try:
            errors = [
                error
                for turn in range(args.swaps)
                for error in one_swap(args.url, model, zeroed, turn, args.tokens)
            ]
        finally:
            back = {"model_path": str(model), "weight_version": label}
            post(f"{args.url}/update_weights_from_disk", back)
    for error, count in sorted(collections.Counter(errors).items()):
        print(f"boundary minus truth {error:+d}: {count} of {len(errors)} requests")
    if not errors:
        print("no request crossed a swap: use more --tokens")


if __name__ == "__main__":
    main()
