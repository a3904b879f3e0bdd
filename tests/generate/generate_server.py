"""An engine behind a real port, in the test's own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

PROMPT = [5, 9, 2, 44, 61]


class Server:
    """An engine behind a real port, in this process."""

    def __init__(self, engine: Any, **options: Any) -> None:
        import uvicorn

        from weightline.generate import build_app
        from weightline.generate.serve import bind

        self.engine = engine
        self.socket = bind("127.0.0.1", 0)
        config = uvicorn.Config(build_app(engine, **options), log_level="warning", lifespan="off")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.socket]})
        self.thread.start()
        url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def close(self) -> None:
        self.http.close()
        self.uvicorn.should_exit = True
        self.engine.stop()
        self.thread.join()
        self.socket.close()

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, **body: Any) -> Any:
        return self.post("/inference/v1/generate", generate_body(**body))

    def wait_until(self, wanted: Callable[[Any], bool]) -> None:
        """Until the engine's state is as wanted, looked at between two steps, for a minute at most."""
        import time

        deadline = time.monotonic() + 60
        while not wanted(self.engine.describe()):
            assert time.monotonic() < deadline, "it did not come"


def generate_body(**body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **body.pop("sampling_params", {})}
    return {"token_ids": PROMPT, "sampling_params": sampling, **body}


def events(lines: Iterator[str]) -> list[Any]:
    """The chunks of a stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]
