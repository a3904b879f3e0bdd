"""Record how the real vLLM answers: `python tests/generate/record_vllm_answers.py URL`, with a server that
`engines/vllm/serve.sh` started on the model that `vllm_exchanges` names.
"""

from __future__ import annotations

import json
import sys
import time

import httpx
from vllm_exchanges import RECORDING, perform_all


def record(url: str) -> dict[str, object]:
    """All answers of the server at `url`, and the names of its metrics."""
    # vLLM tells nothing of requests that arrive while it is paused, so they are given half a second.
    found = perform_all(url, lambda _count: time.sleep(0.5))
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    found["metrics"] = sorted(
        line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE vllm:")
    )
    found["vllm"] = httpx.get(f"{url}/version", trust_env=False).json()["version"]
    return found


if __name__ == "__main__":
    text = json.dumps(record(sys.argv[1].rstrip("/")), indent=1, sort_keys=True, ensure_ascii=True)
    RECORDING.write_text(text + "\n")
