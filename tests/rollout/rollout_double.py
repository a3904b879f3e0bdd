"""An engine double for fault enumeration: named numpy parameters, a label, sessions, a watchdog on a manual
clock, and injected faults.

It samples a "token" before and after every verb: (label, digest of all live weights). A test that ends with
`true_labels()` has proved that no token was ever labelled with a version whose weights did not make it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from weightline import codec
from weightline.errors import ConflictError, RefitError, Unavailable, WeightlineError
from weightline.rollout.engines.base import EngineDescription, Hold, Prepared, Refit

BF16 = ml_dtypes.bfloat16

VERBS = (
    "describe",
    "prepare",
    "pause",
    "apply",
    "verify",
    "invalidate",
    "label",
    "resume",
    "rollback",
    "close",
)


class Killed(BaseException):
    """The follower is gone."""


class Clock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Fault:
    """`error` is raised at the next `times` calls of `verb`, before or after its effect. `Killed` ends the
    follower there."""

    verb: str
    when: str
    error: BaseException
    times: int = 1


@dataclass
class Session:
    name: str
    holder: str
    refit: Refit
    delta: codec.Delta
    heard: float
    paused: bool = False
    applied: bool = False
    labelled: bool = False
    undo: dict[str, np.ndarray] = field(default_factory=dict)
    identity: tuple = ()


class Engine:
    """The engine process: it lives on when a follower dies."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        clock: Clock,
        *,
        aliases: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        self.clock, self.timeout = clock, timeout
        self.aliases = dict(aliases or {})
        self.start_weights = {name: array.copy() for name, array in weights.items()}
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.undo_broken = False
        self.starts = 0
        self.restart()

    def restart(self) -> None:
        """A new process: the weights it started with, no label, no session."""
        self.starts += 1
        self.weights = {
            name: array.copy() for name, array in self.start_weights.items() if name not in self.aliases
        }
        for alias, owner in self.aliases.items():
            self.weights[alias] = self.weights[owner]
        self.label, self.version, self.run = "default", None, None
        self.paused = self.quarantined = False
        self.session: Session | None = None
        self.hold: Hold | None = None
        self.down = False

    @property
    def digest(self) -> str:
        owners = [n for n in self.weights if n not in self.aliases]
        return codec.weights_digest(
            (codec.spec_of(n, self.weights[n]), codec.digest_of(codec.bits_of(self.weights[n])))
            for n in owners
        )

    @property
    def serving(self) -> bool:
        return not (self.paused or self.quarantined or self.down)

    def tick(self) -> None:
        """The engine's own life between two calls: a token, and the watchdog."""
        session = self.session
        if session is not None and self.clock() - session.heard > self.timeout:
            self._roll_back(session)
            if session.paused:
                self.paused = False
            self.session = None
        if self.serving:
            self.tokens.append((self.label, self.digest))

    def _roll_back(self, session: Session) -> None:
        if self.undo_broken and session.applied:
            self.quarantined = True
            raise RefitError("the undo log is lost", engine_state="unknown")
        if session.applied:
            for name, bits in session.undo.items():
                self.weights[name].reshape(-1).view(bits.dtype)[:] = bits
            session.applied = False
        if session.labelled:
            self.label, self.version, self.run = session.identity
            session.labelled = False


class Port:
    """`EnginePort` of one follower on an `Engine`."""

    def __init__(self, engine: Engine, holder: str = "f") -> None:
        self.engine, self.holder = engine, holder
        self.dead = False
        self._count = 0

    def _enter(self, verb: str, when: str) -> None:
        engine = self.engine
        if self.dead:
            raise Killed
        if when == "before":
            engine.calls.append(verb)
            if engine.down:
                raise Unavailable("engine double: connection refused")
        engine.tick()
        for fault in engine.faults:
            if fault.verb == verb and fault.when == when and fault.times:
                fault.times -= 1
                self.dead = isinstance(fault.error, Killed)
                raise fault.error

    def _live(self, prepared: Prepared) -> Session:
        session = self.engine.session
        if session is None or session.name != prepared.session:
            raise ConflictError(f"no session {prepared.session}")
        session.heard = self.engine.clock()
        return session

    def describe(self) -> EngineDescription:
        self._enter("describe", "before")
        e = self.engine
        tensors = tuple(codec.spec_of(name, array) for name, array in e.weights.items())
        answer = EngineDescription(
            kind="double", label=e.label, version=e.version, run=e.run, instance=str(e.starts),
            paused=e.paused, quarantined=e.quarantined, tensors=tensors, aliases=e.aliases,
            hold=e.hold,
        )  # fmt: skip
        self._enter("describe", "after")
        return answer

    def prepare(self, refit: Refit) -> Prepared:
        self._enter("prepare", "before")
        e = self.engine
        if e.session is not None:
            if e.session.holder != self.holder:
                raise ConflictError(
                    f"session {e.session.name} of {e.session.holder} is open", hint="one follower per engine"
                )
            e._roll_back(e.session)
            e.session = None
        if refit.have is not None and (
            e.quarantined or (refit.have, refit.run, refit.have_label) != (e.version, e.run, e.label)
        ):
            raise RefitError(f"needs version {refit.have}, live is {e.version}", engine_state="old")
        delta = codec.read_delta(refit.file)
        missing = [name for name in delta.changed if name not in e.weights]
        if missing:
            raise RefitError(f"no tensor {', '.join(missing)}", engine_state="old")
        self._count += 1
        e.session = Session(
            f"{self.holder}-{self._count}",
            self.holder,
            refit,
            delta,
            e.clock(),
            identity=(e.label, e.version, e.run),
        )
        self._enter("prepare", "after")
        return Prepared(session=e.session.name, elements=delta.elements)

    def pause(self, prepared: Prepared) -> None:
        self._enter("pause", "before")
        self.engine.paused = True
        session = self.engine.session
        if session is not None and session.name == prepared.session:
            session.paused, session.heard = True, self.engine.clock()
        self._enter("pause", "after")

    def apply(self, prepared: Prepared) -> None:
        self._enter("apply", "before")
        session = self._live(prepared)
        if not self.engine.paused:
            raise ConflictError("not paused")
        if not session.applied:
            for name in session.delta.changed:
                session.undo[name] = codec.bits_of(self.engine.weights[name]).copy()
            session.applied = True
            for name in session.delta.changed:
                self._enter("apply", "middle")
                change = session.delta.change(name)
                live = self.engine.weights[name].reshape(-1).view(change.bits.dtype)
                live[slice(None) if change.index is None else change.index] = change.bits
        self._enter("apply", "after")

    def verify(self, prepared: Prepared) -> str:
        self._enter("verify", "before")
        session = self._live(prepared)
        for name, digest in session.refit.digests.items():
            if codec.digest_of(codec.bits_of(self.engine.weights[name])) != digest:
                raise RefitError(f"{name} differs after the write", engine_state="unknown")
        self._enter("verify", "after")
        return "live"

    def invalidate(self, prepared: Prepared) -> None:
        self._enter("invalidate", "before")
        self._live(prepared)
        self._enter("invalidate", "after")

    def label(self, prepared: Prepared) -> None:
        self._enter("label", "before")
        session, e = self._live(prepared), self.engine
        if not e.paused:
            raise ConflictError("not paused")
        session.labelled, e.quarantined = True, False
        e.label, e.version, e.run = session.refit.label, session.refit.version, session.refit.run
        self._enter("label", "after")

    def resume(self) -> None:
        self._enter("resume", "before")
        session = self.engine.session
        if session is not None and session.applied and not session.labelled:
            raise ConflictError("weights are applied and not labelled yet")
        self.engine.paused = False
        self._enter("resume", "after")

    def rollback(self, prepared: Prepared) -> None:
        self._enter("rollback", "before")
        self.engine._roll_back(self._live(prepared))
        self._enter("rollback", "after")

    def close_session(self, prepared: Prepared) -> None:
        self._enter("close", "before")
        self._live(prepared)
        self.engine.session = None
        self._enter("close", "after")

    def digests(self, names: tuple[str, ...] | None = None) -> dict[str, str]:
        self._enter("digests", "before")
        chosen = self.engine.weights if names is None else names
        return {name: codec.digest_of(codec.bits_of(self.engine.weights[name])) for name in chosen}

    def set_hold(self, hold: Hold | None) -> None:
        self._enter("set_hold", "before")
        self.engine.hold = hold
        self._enter("set_hold", "after")

    def close(self) -> None:
        self.dead = True


def bit_equal(engine: Engine, weights: Mapping[str, np.ndarray]) -> bool:
    """Does the engine hold exactly these bytes?"""
    return all(np.array_equal(codec.bits_of(engine.weights[n]), codec.bits_of(a)) for n, a in weights.items())


def true_labels(engine: Engine) -> bool:
    """Did every label stand for one set of weights, over all tokens that were sampled?"""
    made: dict[str, set[str]] = {}
    for label, digest in engine.tokens:
        made.setdefault(label, set()).add(digest)
    return all(len(digests) == 1 for digests in made.values())


ERRORS: dict[str, WeightlineError] = {
    "lost": Unavailable("injected: no answer"),
    "old": RefitError("injected: refused", engine_state="old"),
    "unknown": RefitError("injected: torn", engine_state="unknown"),
    "conflict": ConflictError("injected: conflict"),
    "plain": WeightlineError("injected: internal error"),
}


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """A model in miniature, with bf16, fp32, a scalar and bits that floats would not keep."""
    rng = np.random.default_rng(seed)
    weights = {
        "model.embed_tokens.weight": rng.standard_normal((48, 40)).astype(BF16),
        "model.layers.0.mlp.gate_proj.weight": rng.standard_normal((40, 40)).astype(BF16),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((40, 40)).astype(BF16),
        "model.layers.0.bias": rng.standard_normal(7).astype(np.float32),
        "model.norm.weight": np.ones(40, BF16),
        "model.scale": np.float32(1.5).reshape(()),
    }
    weights["model.layers.0.bias"][:2] = np.array([0x7FC00123, 0x80000000], np.uint32).view(
        np.float32
    )  # NaN payload, -0.0
    return weights


def stepped(
    weights: Mapping[str, np.ndarray], seed: int, names: tuple[str, ...] | None = None
) -> dict[str, np.ndarray]:
    """The weights after a small step: some elements of some tensors change."""
    rng = np.random.default_rng(seed)
    after = {name: array.copy() for name, array in weights.items()}
    for name in names or tuple(n for n in weights if n != "model.norm.weight"):
        flat = after[name].reshape(-1)
        chosen = rng.choice(flat.size, max(1, flat.size // 50), replace=False)
        flat[chosen] = rng.standard_normal(chosen.size).astype(flat.dtype)
    return after
