"""A log in memory and writers that drive the commit machine over it one effect at a time, from a script."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

import msgspec

from weightline.core import commit as machines
from weightline.core.commit import Machine
from weightline.core.ledger import (
    AbandonEntry,
    Entry,
    FenceEntry,
    LedgerState,
    RetireEntry,
    ThinEntry,
    VersionEntry,
    YankEntry,
    decode,
    encode,
)
from weightline.core.plan import plan
from weightline.core.request import CommitRequest
from weightline.core.retention import decide
from weightline.core.staleness import between
from weightline.errors import WeightlineError


def request(name: str = "a", **fields: object) -> CommitRequest:
    """A commit request whose every field is a plain default."""
    defaults: dict[str, object] = {
        "commit_id": name,
        "write_id": f"w-{name}",
        "writer": "test",
        "epoch": None,
        "at": 0.0,
        "base": None,
        "stored": "anchor",
        "digest": f"{sum(map(ord, name)):08x}" * 8,
        "folder": f"versions/{name}",
        "nbytes": 100,
        "delta_nbytes": 0,
        "raw_nbytes": 100,
        "changed": 10,
        "elements": 50,
        "weights_digest": f"weights-{name}",
    }
    return CommitRequest(**(defaults | fields))  # type: ignore[arg-type]


@dataclass
class Writer:
    state: LedgerState
    epoch: int | None = None
    machine: Machine | None = None
    todo: list[machines.Effect] = field(default_factory=list)
    writes: int = 0


class World:
    """`run(line)` performs one command of a script and gives the lines that it prints."""

    def __init__(self) -> None:
        self.log: dict[int, Entry] = {}
        self.hint = 0
        self.writers: dict[str, Writer] = {}

    def state(self) -> LedgerState:
        state = LedgerState("run")
        for seq in sorted(self.log):
            state = state.apply(seq, self.log[seq])
        return state

    def run(self, line: str) -> list[str]:
        command, *words = shlex.split(line)
        names = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            out = getattr(self, f"do_{command}")(*names, **options)
        except WeightlineError as error:
            return [f"{error.kind}: {error.message}"]
        return out or ["ok"]

    # Writers ------------------------------------------------------------------------------------------------

    def do_open(self, name: str) -> list[str]:
        self.writers[name] = Writer(self.state())
        return [f"{name} sees seq={self.writers[name].state.seq} head={len(self.writers[name].state)}"]

    def do_commit(self, name: str, id: str = "", base: str = "head", **options: str) -> list[str]:
        self.do_begin(name, id, base, **options)
        return self.do_go(name)

    def do_begin(self, name: str, id: str = "", base: str = "head", **options: str) -> list[str]:
        writer = self.writers[name]
        writer.writes += 1
        head = len(writer.state) or None
        number = {"head": head, "none": None}[base] if base in ("head", "none") else int(base)
        size = int(options.pop("nbytes", "10"))
        anchor = number is None or options.pop("anchor", "") == "yes"
        ident = id or f"{name}{writer.writes}"
        fields: dict[str, object] = {"epoch": writer.epoch}
        fields |= {k: int(v) if v.isdigit() else v for k, v in options.items()}
        req = request(
            ident,
            write_id=f"{name}.{writer.writes}",
            base=number,
            stored="anchor" if anchor else "delta",
            digest=f"{len(ident):02x}{sum(map(ord, ident)) % 256:02x}" * 16,
            nbytes=(100 if anchor else 0) + (size if number is not None else 0),
            delta_nbytes=size if number is not None else 0,
            **fields,
        )
        writer.machine = machines.commit(writer.state, req)
        writer.todo = writer.machine.start()
        return self._pending(writer)

    def do_yank(self, name: str, version: str, reason: str = "bad") -> list[str]:
        writer = self.writers[name]
        writer.machine = machines.yank(writer.state, int(version), write_id=f"{name}.y", at=0, reason=reason)
        writer.todo = writer.machine.start()
        return self.do_go(name)

    def do_retire(self, name: str, *versions: str) -> list[str]:
        writer = self.writers[name]
        wanted = tuple(map(int, versions))
        writer.machine = machines.retire(writer.state, wanted, write_id=f"{name}.r", at=0, reason="room")
        writer.todo = writer.machine.start()
        return self.do_go(name)

    def do_thin(self, name: str, *versions: str, form: str = "anchor") -> list[str]:
        writer = self.writers[name]
        wanted = tuple(map(int, versions))
        writer.machine = machines.thin(
            writer.state,
            wanted,
            form=form,
            write_id=f"{name}.t",
            at=0,
            reason="room",  # type: ignore[arg-type]
        )
        writer.todo = writer.machine.start()
        return self.do_go(name)

    def do_refresh(self, name: str) -> list[str]:
        self.writers[name].state = self.state()
        return []

    def do_step(self, name: str, outcome: str = "answer") -> list[str]:
        """Perform the next effect. `lose`: its answer gets lost. `drop`: it never happens."""
        writer = self.writers[name]
        if ended := self._finish(writer):
            return ended
        effect = writer.todo.pop(0)
        event: machines.Event | None = None
        match effect:
            case machines.PutIfAbsent(seq, entry):
                event = self._put(seq, entry, outcome)
            case machines.ReadEntry(seq):
                found = self.log.get(seq)
                event = machines.ReadMissing(seq) if found is None else machines.ReadOk(seq, found)
            case machines.WriteHeadHint(seq):
                self.hint = seq
            case _:
                raise AssertionError(effect)
        out = [show_effect(effect) + (f" -> {type(event).__name__}" if event else "")]
        assert writer.machine is not None
        if event is not None:
            writer.todo = writer.machine.step(event)
        writer.state = writer.machine.state
        return out + self._finish(writer)

    def _put(self, seq: int, entry: Entry, outcome: str) -> machines.Event:
        entry = decode(encode(entry))
        if outcome == "drop":
            return machines.PutLost(seq)
        if seq in self.log:
            return machines.PutExists(seq, self.log[seq])
        self.log[seq] = entry
        # "retried": the layer below put it twice and reports the second answer.
        return {
            "answer": machines.PutOk(seq),
            "lose": machines.PutLost(seq),
            "retried": machines.PutExists(seq, entry),
        }[outcome]

    def do_go(self, name: str) -> list[str]:
        out: list[str] = []
        writer = self.writers[name]
        out += self._finish(writer)
        while writer.todo:
            out += self.do_step(name)
        return out

    def do_crash(self, name: str) -> list[str]:
        del self.writers[name]
        return []

    def _finish(self, writer: Writer) -> list[str]:
        """Effects that end the machine are performed at once."""
        out = []
        while writer.todo and isinstance(
            writer.todo[0], machines.WriteHeadHint | machines.Done | machines.Failed
        ):
            effect = writer.todo.pop(0)
            match effect:
                case machines.WriteHeadHint(seq):
                    self.hint = seq
                case machines.Done():
                    if isinstance(effect.entry, VersionEntry) and not effect.repeated:
                        writer.epoch = effect.epoch
                    out.append(show_effect(effect))
                case machines.Failed():
                    out.append(show_effect(effect))
        return out

    def _pending(self, writer: Writer) -> list[str]:
        return [f"next: {show_effect(effect)}" for effect in writer.todo]

    # Readers ------------------------------------------------------------------------------------------------

    def do_log(self) -> list[str]:
        return [f"{seq} {show_entry(entry)}" for seq, entry in sorted(self.log.items())]

    def do_state(self) -> list[str]:
        state = self.state()
        sets = {
            k: sorted(getattr(state, k))
            for k in ("retired", "thinned", "detached", "yanked", "abandoned")
            if getattr(state, k)
        }
        return [f"seq={state.seq} epoch={state.epoch} versions={len(state)}"] + [
            f"{name} {values}" for name, values in sets.items()
        ]

    def do_plan(self, have: str, want: str) -> list[str]:
        found = plan(self.state(), None if have == "none" else int(have), int(want))
        steps = ", ".join(f"{s.form} {s.version} ({s.nbytes})" for s in found.steps)
        return [f"{found.relation}: {steps or 'nothing'} = {found.nbytes} bytes"]

    def do_retain(self, **options: str) -> list[str]:
        leased = {int(v): "someone" for v in options.pop("leased", "").split(",") if v}
        pinned = [int(v) for v in options.pop("pinned", "").split(",") if v]
        bounds = {name: int(value) for name, value in options.items()}
        decision = decide(self.state(), pinned=pinned, leased=leased, **bounds)  # type: ignore[arg-type]
        out = [
            f"{'keep' if e.action == 'keep' else e.action.upper()} {e.version} ({e.nbytes}): {e.why}"
            for e in decision.explained
        ]
        wanted = ", anchor wanted" if decision.anchor_wanted else ""
        return [*out, f"kept {decision.kept_nbytes} bytes, freed {decision.freed_nbytes}{wanted}"]

    def do_distance(self, sampled: str, now: str) -> list[str]:
        found = between(self.state().lineage(), int(sampled), int(now))
        return [f"off={found.off} behind={found.behind} total={found.total}"]


def show_entry(entry: Entry) -> str:
    match entry:
        case FenceEntry():
            return f"fence epoch={entry.epoch}"
        case VersionEntry():
            base = "" if entry.base is None else f" base={entry.base}"
            parent = "" if entry.parent is None else f" parent={entry.parent}"
            head = f"version {entry.version}{parent}{base}"
            return f"{head} epoch={entry.epoch} {entry.stored} label={entry.label}"
        case RetireEntry():
            return f"retire {list(entry.versions)}"
        case ThinEntry():
            return f"thin {list(entry.versions)} {entry.form}"
        case YankEntry():
            return f"yank {entry.version}"
        case AbandonEntry():
            return f"abandon {list(entry.versions)}"


def show_effect(effect: machines.Effect) -> str:
    match effect:
        case machines.PutIfAbsent():
            return f"put {effect.seq} {show_entry(effect.entry)}"
        case machines.ReadEntry():
            return f"read {effect.seq}"
        case machines.WriteHeadHint():
            return f"hint {effect.seq}"
        case machines.Done():
            what = (
                f"version {effect.entry.version}"
                if isinstance(effect.entry, VersionEntry)
                else effect.entry.__class__
            )
            if not isinstance(what, str):
                what = show_entry(effect.entry)
            return f"done: {what} at seq {effect.seq}{' (repeated)' if effect.repeated else ''}"
        case machines.Failed():
            return f"failed: {effect.error.kind}: {effect.error.message}"
    raise AssertionError(msgspec.json.encode(effect))
