"""Commands around live processes: serve, engine, follow, check, demo."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from weightline.cli.app import command
from weightline.cli.arguments import EngineOption, JsonOption, StoreArgument, opened
from weightline.cli.output import print_event, print_json, say


@command("demo", "Start here", store=False)
def demo(
    model: Annotated[
        str, typer.Option("--model", metavar="smollm2|tiny|DIR", help="The policy to train.")
    ] = "smollm2",
    steps: Annotated[
        int | None, typer.Option("--steps", help="Optimizer steps; default: chosen for the model.", min=1)
    ] = None,
    engines: Annotated[
        int, typer.Option("--engines", help="Rollout engines, each with its follower.", min=1)
    ] = 2,
    dir: Annotated[
        Path | None, typer.Option("--dir", help="Keep the run here; default: a temporary folder, removed.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """The main job in small: server, GRPO trainer and live engines as real processes; an audit at the end.

    Example: weightline demo --model tiny --steps 5
    """
    from weightline.demo import run_demo

    report = run_demo(model=model, steps=steps, engines=engines, dir=dir, json=json)
    if json:
        print_json(report)


@command("serve", "Processes")
def serve(
    store: StoreArgument,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="unix:PATH", help="Unix socket; default: in the runtime dir."),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option("--grpc", metavar="HOST:PORT", help="Also listen on TCP (loopback only, for now)."),
    ] = None,
    http: Annotated[
        str | None, typer.Option("--http", metavar="HOST:PORT", help="Status page for people and probes.")
    ] = None,
    max_versions: Annotated[int, typer.Option("--max-versions", help="Anchors to keep at most.", min=1)] = 20,
    sync_timeout: Annotated[
        float, typer.Option("--sync-timeout", help="Seconds until a subscriber counts as lagging.")
    ] = 30.0,
    cleanup_interval: Annotated[
        float, typer.Option("--cleanup-interval", help="Seconds between two cleanings.")
    ] = 60.0,
    runtime_dir: Annotated[Path | None, typer.Option("--runtime-dir", help="Where the socket lives.")] = None,
    json: JsonOption = False,
) -> None:
    """The resident server of a store; makes the store when there is none. Stops on Ctrl-C or SIGTERM.

    Example: weightline serve ./ckpt --listen unix:/tmp/wl.sock
    """
    from weightline.service import serve as run_server

    def ready(facts: dict[str, Any]) -> None:
        if json:
            print_event({"event": "ready", **facts})
        else:
            say(f"serving {store} on {facts['listen']} (Ctrl-C stops)")

    run_server(
        store,
        listen=listen,
        grpc=grpc,
        http=http,
        max_versions=max_versions,
        sync_timeout=sync_timeout,
        cleanup_interval=cleanup_interval,
        runtime_dir=runtime_dir,
        ready=ready,
    )


@command("engine", "Processes", store=False)
def engine(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.", show_default=False)
    ],
    port: Annotated[int, typer.Option("--port", help="TCP port.", min=1, max=65535)],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    dtype: Annotated[
        str, typer.Option("--dtype", help="Compute dtype: auto, float32, bfloat16. auto is float32 on a CPU.")
    ] = "auto",
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", help="Requests that run at once.", min=1)
    ] = 16,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", help="Prompt and output tokens of a request.", min=2)
    ] = 2048,
    kv_tokens: Annotated[
        int | None,
        typer.Option("--kv-tokens", help="Tokens whose KV fits at once; default: all of them.", min=2),
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", help="Tokens whose KV is held for new requests; 0: none.", min=0)
    ] = 4096,
    session_timeout: Annotated[
        float, typer.Option("--session-timeout", help="Seconds of silence after which a refit is undone.")
    ] = 30.0,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Compute threads; default: torch's.", min=1)
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="Its name in the API; default: its folder, any name is served."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """The embedded rollout engine: continuous batching over transformers, vLLM's RL routes, exact spans.

    Example: weightline engine ./policy --port 8001
    """
    from weightline.generate import serve_engine

    def ready(facts: dict[str, Any]) -> None:
        if json:
            print_event({"event": "ready", **facts})
        else:
            say(f"engine for {model} on http://{host}:{port} (Ctrl-C stops)")

    serve_engine(
        model,
        host=host,
        port=port,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens,
        prefix_tokens=prefix_tokens,
        session_timeout=session_timeout,
        threads=threads,
        served_model_name=served_model_name,
        ready=ready,
    )


def _describe_event(event: dict[str, Any]) -> str:
    rest = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("event", "phases") and v is not None)
    return f"{event.get('event', '?'):<10}{rest}"


@command("follow", "Processes")
def follow(
    store: StoreArgument,
    engine: EngineOption,
    id: Annotated[str, typer.Option("--id", help="Name of this subscriber; its acks carry it.")] = "engine-0",
    at: Annotated[
        int | None, typer.Option("--at", metavar="VERSION", help="Bring the engine to this version and hold.")
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Do not move the engine by itself.")] = False,
    runtime_dir: Annotated[
        Path | None, typer.Option("--runtime-dir", help="Where the follower keeps its working files.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
) -> None:
    """Keep one live engine on the newest version, without dropping a request; acknowledge each refit.

    Example: weightline follow ./ckpt --engine embedded=http://127.0.0.1:8001 --id engine-0
    """
    from weightline.rollout import follow as run_follower

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A refit in progress is completed or undone before the follower goes.
        signal.signal(number, lambda *_: stop.set())
    run_follower(
        store,
        engine,
        id=id,
        at=at,
        hold=hold,
        runtime_dir=runtime_dir,
        on_event=print_event if json else lambda event: say(_describe_event(event)),
        stop=stop,
    )


@command("rollback", "Processes")
def rollback(
    store: StoreArgument,
    engine: EngineOption,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="VERSION", help="Default: the version before the one it serves."),
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="End the hold; nothing else.")] = False,
    id: Annotated[str, typer.Option("--id", help="Name of the engine's subscriber.")] = "engine-0",
    runtime_dir: Annotated[
        Path | None, typer.Option("--runtime-dir", help="Where the working files are kept.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Step one live engine back to the version before, and hold it there: its follower holds too.

    Example: weightline rollback ./ckpt --engine vllm=http://127.0.0.1:8000
    """
    from weightline.errors import InvalidInput
    from weightline.rollout import release as run_release
    from weightline.rollout import rollback as run_rollback

    if release and to is not None:
        raise InvalidInput("--release and --to exclude each other", hint="release, then follow --at VERSION")
    with opened(store) as line:
        if release:
            report = run_release(line, engine, runtime_dir=runtime_dir)
        else:
            report = run_rollback(line, engine, to=to, id=id, runtime_dir=runtime_dir)
    if json:
        print_json(report)
    elif report.held:
        say(f"{engine} serves version {report.version} ({report.label}) and is held there")
        say("let it follow again: weightline rollback STORE --engine ... --release")
    else:
        say(f"{engine} is not held any more; its follower moves it")


@command("check", "Processes")
def check(
    store: StoreArgument,
    engine: EngineOption,
    version: Annotated[
        int | None,
        typer.Argument(metavar="[VERSION]", help="Default: the version the engine says it serves."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Do a live engine's weights equal a version, tensor by tensor? Exit code 0 only if every digest agrees.

    Example: weightline check ./ckpt --engine embedded=http://127.0.0.1:8001 7
    """
    from weightline.errors import STATUS
    from weightline.rollout import check as run_check

    with opened(store) as line:
        report = run_check(line, engine, version)
    if json:
        print_json(report)
    else:
        for name in report.mismatches:
            say(f"differs: {name}")
        verdict = "equal" if report.ok else f"{len(report.mismatches)} differ"
        if report.unreadable:
            say(f"{len(report.unreadable)} cannot be read back: the engine processed them after loading")
        say(f"{report.tensors} tensors compared with version {report.version} ({report.label}): {verdict}")
    if not report.ok:
        raise SystemExit(STATUS["integrity"].exit_code)
