"""Judges outputs: every token against its label, every terminal, every key and value that a token attended
to."""

from __future__ import annotations

import itertools
import threading

from msgspec import Struct

from weightline.core import spans
from weightline.errors import InvalidInput
from weightline.testing import faults
from weightline.testing.client import Output, Reply
from weightline.testing.marker import MarkerModel
from weightline.testing.report import Findings
from weightline.testing.swaps import Mark, Swaps

SHOWN = 5
"""Examples kept of each kind of fault."""


class Sent(Struct, frozen=True):
    """What was known when a request went out."""

    floor: int
    """The version that was live, its refit complete."""
    aborted: bool = False
    """Something may have aborted it: an abort of ours, or a pause that ends requests."""
    fresh: bool = True
    """Its prompt begins like no other: there is nothing in a prefix cache for it."""


class Tally(Struct):
    """Counts over all outputs judged so far."""

    requests: int = 0
    outputs: int = 0
    tokens: int = 0
    """Tokens compared with their label."""
    wrong: int = 0
    """Tokens whose label names another version than the one that sampled them."""
    mixed: int = 0
    """Outputs of more than one version."""
    aborted: int = 0
    left: int = 0
    """Requests whose client went away."""
    kv_judged: int = 0
    """Tokens that had to have keys and values of their own version only."""


class Judge:
    """Collects verdicts from several threads; `report` turns them into checks."""

    def __init__(self, swaps: Swaps, model: MarkerModel) -> None:
        self.swaps, self.model = swaps, model
        self.tally = Tally()
        self.claims: list[faults.Claim] = []
        self.faults: dict[str, list[str]] = {}
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    # One reply.

    def add(self, reply: Reply, sent: Sent, ceiling: int) -> None:
        """Judge everything that came back; `ceiling`: the newest version the engine could serve by now."""
        with self._lock:
            self.tally.requests += 1
            if reply.left:
                self.tally.left += 1
                return
            if reply.error or reply.status != 200:
                self._fault("requests.answered", reply, f"HTTP {reply.status} {reply.error}")
                if reply.status != 200:
                    return
            self._terminals(reply)
            for output in reply.outputs.values():
                self.tally.outputs += 1
                self._output(reply, output, sent, ceiling)

    def _terminals(self, reply: Reply) -> None:
        missing = [i for i in range(reply.ask.n) if not (reply.outputs.get(i) and reply.outputs[i].finish)]
        if missing:
            stream = reply.ask.stream and reply.ends
            where = "stream.final-chunk" if stream else "terminals.lost"
            self._fault(where, reply, f"sequence {missing[0]} of {reply.ask.n} never ended")
        extra = [o.index for o in reply.outputs.values() if len(o.finish) > 1 or o.after_final]
        extra += [i for i in reply.outputs if not 0 <= i < reply.ask.n]
        if extra or reply.ends > 1:
            self._fault("terminals.once", reply, f"sequence {extra} ended again, {reply.ends} end marks")
        if reply.ends == 0:
            self._fault("terminals.lost", reply, "the answer broke off before its end mark")

    def _output(self, reply: Reply, output: Output, sent: Sent, ceiling: int) -> None:
        if not output.finish:
            return
        reason, count = output.finish[0], len(output.token_ids)
        if output.early_spans:
            self._fault("spans.final-only", reply, f"{output.early_spans} earlier events had spans")
        if reason == "abort":
            self.tally.aborted += 1
            if not sent.aborted:
                self._fault("requests.undisturbed", reply, "it was aborted, and nobody asked for it")
        elif reason == "length" and count != reply.ask.max_tokens:
            self._fault("tokens.all", reply, f"length, but {count} tokens of {reply.ask.max_tokens}")
        elif reason == "stop":
            if not output.token_ids or output.token_ids[-1] not in reply.ask.stop_token_ids:
                self._fault("tokens.all", reply, f"stop, but the last token is {output.token_ids[-1:]}")
        elif reason != "length":
            self._fault("requests.answered", reply, f"finish reason {reason!r}")
        try:
            found = output.versions()
            spans.validate(found, count)
        except InvalidInput as error:
            self._fault("spans.cover", reply, error.message)
            return
        marks = [self.swaps.marks.get(span.version) for span in found]
        if None in marks:
            unknown = [s.version for s, m in zip(found, marks, strict=True) if m is None]
            self._fault("spans.known", reply, f"no version has the label {unknown[0]!r}")
            return
        claimed = [m for s, m in zip(found, marks, strict=True) if m for _ in range(s.start, s.end)]
        self._tokens(reply, output, claimed, sent, ceiling)

    def _tokens(self, reply: Reply, output: Output, claimed: list[Mark], sent: Sent, ceiling: int) -> None:
        versions = tuple(mark.version for mark in claimed)
        self.tally.tokens += len(versions)
        self.tally.mixed += len(set(versions)) > 1
        truth, stale = self._truth(output.token_ids, versions, sent.floor, ceiling)
        wrong = sum(t != v for t, v in zip(truth, versions, strict=True))
        if wrong:
            self.tally.wrong += wrong
            self._fault(
                "labels.exact", reply, f"tokens of versions {_runs(truth)} claimed as {_runs(versions)}"
            )
            chunks = tuple(output.chunks)
            if all(truth):
                self.claims.append(faults.Claim(truth, versions, chunks, sent.floor, ceiling))
        if versions and (versions[0] < sent.floor or versions[-1] > ceiling):
            text = f"versions {_runs(versions)}, but {sent.floor} to {ceiling} were live while it ran"
            self._fault("labels.live", reply, text)
        if any(b < a for a, b in itertools.pairwise(versions)):
            self._fault("labels.order", reply, f"versions {_runs(versions)}")
        self._kv(reply, output, truth, stale, sent)

    def _truth(
        self, tokens: list[int], claimed: tuple[int, ...], floor: int, ceiling: int
    ) -> tuple[tuple[int, ...], list[bool]]:
        """The version that each token says it comes from (0: none that could be), and whether its KV was
        mixed."""
        by_version = {m.version: m for m in self.swaps.marks.values() if m.model is self.model}
        truth, stale = [], []
        for token, claim in zip(tokens, claimed, strict=True):
            found, mixed = 0, False
            # The claim first: versions far apart may share a token.
            for version in (claim, *range(max(1, floor - 2), ceiling + 1)):
                mark = by_version.get(version)
                if mark is None:
                    continue
                if token == mark.token:
                    found, mixed = version, False
                    break
                if self.model.kind == "kv" and token == mark.token + 1:
                    found, mixed = version, True
                    break
            truth.append(found)
            stale.append(mixed)
        return tuple(truth), stale

    def _kv(
        self, reply: Reply, output: Output, truth: tuple[int, ...], stale: list[bool], sent: Sent
    ) -> None:
        for at, (version, mixed) in enumerate(zip(truth, stale, strict=True)):
            swap = self.swaps.history.get(version)
            late = version != 0 and sent.floor >= version
            if not late and not (swap and swap.pure):
                continue
            self.tally.kv_judged += 1
            if not mixed:
                continue
            text = f"token {at} of version {version} attended to KV of another one"
            if late or truth[0] == version:  # it never ran under another version
                self._fault("kv.fresh" if sent.fresh else "kv.prefix-cache", reply, text)
            else:
                self._fault("kv.recomputed", reply, text)
            return
        self._provenance(reply, output, truth, stale)

    def _provenance(self, reply: Reply, output: Output, truth: tuple[int, ...], stale: list[bool]) -> None:
        """`kv_weight_versions`, where an engine has it, against what the last token saw."""
        if self.model.kind != "kv" or not output.kv_spans or not truth or not truth[-1]:
            return
        mark = next(m for m in self.swaps.marks.values() if m.version == truth[-1])
        if output.finish[0] == "abort" or output.kv_spans[-1]["end"] < len(reply.ask.prompt) + len(truth) - 1:
            return
        says = len({s["version"] for s in output.kv_spans}) > 1 or output.kv_spans[0]["version"] != mark.label
        own = sum(s["end"] - s["start"] for s in output.kv_spans if s["version"] == mark.label)
        total = output.kv_spans[-1]["end"]
        if stale[-1] and not says:
            self._fault("kv.provenance", reply, "its last token saw KV that kv_weight_versions does not name")
        if says and not stale[-1] and own * 16 < total * 15:
            self._fault("kv.provenance", reply, "kv_weight_versions names KV that its last token did not see")

    def _fault(self, check: str, reply: Reply, text: str) -> None:
        self.counts[check] = self.counts.get(check, 0) + 1
        shown = self.faults.setdefault(check, [])
        if len(shown) < SHOWN:
            shown.append(f"{reply.ask.id}: {text}")

    # All of them.

    def report(self, into: Findings, prefix: str) -> None:
        """One check a rule, in a fixed order."""
        tally = self.tally
        named = faults.name(self.claims)
        for check, what in RULES.items():
            count = self.counts.get(check, 0)
            text = f"{count} times, e.g. {self.faults[check][0]}" if count else _seen(tally)
            into.add(f"{prefix}.{check}", what, count == 0, text)
        for check, what in faults.FAULTS.items():
            claims = named.get(check, [])
            text = f"it alone explains {len(claims)} outputs" if claims else f"{tally.mixed} mixed outputs"
            into.add(f"{prefix}.{check}", what, not claims, text)


RULES = {
    "requests.answered": "every request is answered with a 200 and a known finish reason",
    "requests.undisturbed": "no request ends as aborted unless somebody aborted it",
    "terminals.once": "no output and no stream ends twice, and nothing comes after its end",
    "terminals.lost": "every output has its terminal",
    "stream.final-chunk": "the last chunk of a stream is sent, also when it has no new token",
    "tokens.all": "no token is lost or doubled",
    "spans.cover": "spans cover every returned token once, in order, merged",
    "spans.final-only": "spans come with the final output only",
    "spans.known": "every label is that of a committed version",
    "labels.exact": "every token has the label of the version that sampled it",
    "labels.live": "every label was live between the request and its answer",
    "labels.order": "labels follow the order of the swaps",
    "kv.fresh": "a new request with a new prompt attends to its own version's KV only",
    "kv.prefix-cache": "a new request never matches cached KV of another version",
    "kv.recomputed": "after a pause that clears the cache no running request reads KV of another version",
    "kv.provenance": "kv_weight_versions tells the same as the tokens",
}
"""Rules that hold for every output whatever happens."""


def _runs(versions: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return " ".join(f"{version}x{count}" for version, count in runs[:12]) or "(none)"


def _seen(tally: Tally) -> str:
    return f"{tally.outputs} outputs, {tally.tokens} tokens"
