"""The demo's trainer on a real store, a real engine and a real follower: steps, events, and a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from demo_engine import DemoEngine, demo_engine

import weightline
from weightline.demo.models import resolve_model, tiny_model
from weightline.demo.trainer import TrainerConfig, default_config, read_config
from weightline.errors import InvalidInput
from weightline.rollout import follow
from weightline.store import Store

pytestmark = pytest.mark.torch


class Rig:
    """One store, one engine with its follower, and trainer processes one after another."""

    def __init__(self, folder: Path, engine: DemoEngine, root: Path) -> None:
        self.folder, self.engine, self.root = folder, engine, root
        self.store = root / "store"
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    def follow(self) -> None:
        url = f"embedded={self.engine.url}"
        self.thread = threading.Thread(
            target=follow,
            args=(f"file://{self.store}", url),
            kwargs={"id": "engine-0", "runtime_dir": self.root / "run", "stop": self.stop},
        )
        self.thread.start()

    def config(self, **fields: Any) -> Path:
        config = msgspec.structs.replace(
            default_config("tiny"),
            store=f"file://{self.store}",
            engines=(self.engine.url,),
            model=str(self.folder),
            rollouts=str(self.root / "rollouts.jsonl"),
            max_tokens=16,
            **fields,
        )
        path = self.root / "trainer.json"
        path.write_bytes(msgspec.json.encode(config))
        return path

    def train(self, **fields: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "weightline.demo.trainer", "--config", str(self.config(**fields))],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    folder = tiny_model(tmp_path / "model")
    Store.open(tmp_path / "store", create=True)
    (tmp_path / "run").mkdir()
    with demo_engine(folder) as engine:
        rig = Rig(folder, engine, tmp_path)
        rig.follow()
        try:
            yield rig
        finally:
            rig.stop.set()
            if rig.thread is not None:
                rig.thread.join()


def events(process: subprocess.Popen[str], until: str = "", count: int = 1) -> list[dict[str, Any]]:
    """Events up to the `count`-th of name `until`, or to the end."""
    seen: list[dict[str, Any]] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(json.loads(line))
        if sum(e["event"] == until for e in seen) == count:
            break
    return seen


def named(seen: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [e for e in seen if e["event"] == event]


def test_it_trains_dies_and_goes_on_to_the_last_step(rig: Rig) -> None:
    with rig.train(steps=1000, attachments_every=2) as process:
        seen = events(process, "step", 3)
        process.kill()
    assert seen[0]["event"] == "start"
    versions = named(seen, "version")
    assert [(v["version"], v["step"]) for v in versions[:3]] == [(1, 0), (2, 1), (3, 2)]
    assert versions[0]["changed_fraction"] == 1.0
    assert all(0.001 < v["changed_fraction"] < 0.15 for v in versions[1:])
    assert all(v["nbytes"] * 2 < v["raw_nbytes"] and v["blocked_ms"] > 0 for v in versions[1:])
    steps = named(seen, "step")
    assert all(s["reward_std"] > 0 and s["groups_with_variance"] == 4 for s in steps)
    assert all(s["grad_norm"] > 0 and s["tokens"] > 0 for s in steps)

    with weightline.connect(f"file://{rig.store}") as line:
        newest = line.latest()
        recovered = max(r.version for r in line.versions() if r.attachments)
        first_run = {r.version: line.load(r.version) for r in line.versions()}
    with rig.train(steps=5, attachments_every=2) as process:
        seen = events(process)
        assert process.wait(60) == 0
    (resumed,) = named(seen, "resumed")
    assert resumed["version"] == recovered
    assert resumed["step"] == recovered - 1
    assert [v["version"] for v in named(seen, "version")] == list(
        range(newest + 1, newest + 1 + 5 - resumed["step"])
    )
    done = seen[-1]
    assert done["event"] == "done"
    assert done["step"] == 5
    counts = named(seen, "rollouts")[-1]
    assert counts["dropped"] == 0
    with weightline.connect(f"file://{rig.store}") as line:
        records = {r.version: r for r in line.versions()}
        assert records[newest + 1].parent == recovered
        assert {v for v, r in records.items() if r.abandoned} == set(resumed["abandoned"])
        assert all(
            array.tobytes() == line.load(v)[name].tobytes()
            for v, weights in first_run.items()
            for name, array in weights.items()
        )
        assert records[max(records)].attachments == ("trainer",)
    assert not list(rig.root.glob("trainer-state-*"))


def test_the_defaults_fit_the_model(tmp_path: Path) -> None:
    assert default_config("tiny").task == "tokens"
    real = default_config("smollm2")
    assert real.group_size * real.groups_per_step * real.max_tokens <= 256
    folder = resolve_model("tiny", tmp_path)
    assert default_config(str(folder)).task == "sums"
    (folder / "chat_template.jinja").unlink()
    assert default_config(str(folder)).task == "tokens"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"store": ""}, "store is not set"),
        ({"engines": ()}, "engines is not set"),
        ({"steps": 0}, "steps is 0"),
        ({"groups_in_flight": 3}, "groups_in_flight is 3"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    whole = TrainerConfig(store="file:///s", engines=("http://e",), model="m", rollouts="r")
    path = tmp_path / "c.json"
    path.write_bytes(msgspec.json.encode(whole))
    assert read_config(path) == whole
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(whole, **fields)))
    with pytest.raises(InvalidInput, match=says):
        read_config(path)


@pytest.mark.parametrize("text", ["", "{", '{"stepz": 3}', '{"steps": "many"}'])
def test_a_config_that_is_none_is_one_line_and_an_exit_code(tmp_path: Path, text: str, capsys: Any) -> None:
    from weightline.demo.trainer import main

    path = tmp_path / "c.json"
    path.write_text(text)
    assert main(["--config", str(path)]) == InvalidInput("").status.exit_code
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "invalid_input"
    assert err.startswith(f"trainer: {path}: ")
