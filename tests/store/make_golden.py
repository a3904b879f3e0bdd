"""Writes the golden store of format 1: `python tests/store/make_golden.py`. Only for a new format number."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

from test_store_format import GOLDEN, golden_weights

from weightline.store import Store


def main() -> None:
    """Five versions; 4 has an attachment, 5 is yanked, 3 is thinned to its delta; one index block."""
    with patch(
        "weightline.store.run.uuid.uuid4", return_value=UUID("c0ffee00-0001" + "-0000" * 2 + "-" + "0" * 12)
    ):
        Store.open(GOLDEN, create=True, clock=lambda: 1.0).close()
    store = Store.open(GOLDEN, clock=lambda: 2.0)
    writer = store.writer()
    for k in range(1, 6):
        attachments = {"opt": b"state of step 40"} if k == 4 else None
        weights = golden_weights(k)
        writer.commit(weights, step=10 * k, anchor=True, commit_id=f"c{k}", attachments=attachments)
    store.yank(5, "golden")
    store.thin([3], "anchor", "golden")
    folder = store.root / store.record(3).folder
    (folder / "model.safetensors").unlink()
    store.refresh()
    store.log.index.write(store.state.seq)
    store.close()
    for leftover in (
        "catalog.sqlite",
        "catalog.sqlite-wal",
        "catalog.sqlite-shm",
        "server.lock",
        "cleaner.lock",
    ):
        Path(GOLDEN, leftover).unlink(missing_ok=True)
    for empty in ("pins", "leases"):
        shutil.rmtree(GOLDEN / empty, ignore_errors=True)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN)
    main()
