"""The store: a ledger, version folders and an index on a local folder.

`Store` reads and cleans, its `Writer` commits. The log is the truth; everything else can be rebuilt or is
staged.
"""

from __future__ import annotations

from weightline.core.request import CommitRequest
from weightline.store.catalog import Subscriber, TraceEvent
from weightline.store.collect import CollectReport
from weightline.store.leases import Lease
from weightline.store.manifest import Blob, Manifest, TensorEntry
from weightline.store.ranks import Rank, Receipt, Shard, commit_ranks
from weightline.store.recovered import Recovered
from weightline.store.store import Store
from weightline.store.writer import Published, Staged, Writer

__all__ = [
    "Blob",
    "CollectReport",
    "CommitRequest",
    "Lease",
    "Manifest",
    "Published",
    "Rank",
    "Receipt",
    "Recovered",
    "Shard",
    "Staged",
    "Store",
    "Subscriber",
    "TensorEntry",
    "TraceEvent",
    "Writer",
    "commit_ranks",
]
