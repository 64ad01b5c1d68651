"""What a store says, without what may differ from run to run: times, keys of nights."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

COMPARED = {
    "results": 'campaign, target, round, idx, origin, "case", verdict, worst_ratio, result, harness',
    "findings": "campaign, fault, id, signature, known, target, round, idx, size, data, severity, reachability",
    "failures": "campaign, fault, target, round, idx",
    "reached": "campaign, target, round, idx, what",
    "rounds": "campaign, target, round, shard, cases",
    "corpus": "campaign, target, round, idx, reason",
    "campaigns": "id, identity, ordinal, finished",
}


def rows(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table that two runs of the same campaign share."""
    connection = sqlite3.connect(folder / "store.sqlite")
    try:
        return {
            table: connection.execute(f"SELECT {columns} FROM {table} ORDER BY {columns}").fetchall()
            for table, columns in COMPARED.items()
        }
    finally:
        connection.close()
