"""Several stores joined into one: the shards of a campaign that ran on several machines, or copies of one store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fuzz.campaign.finding import saved_finding
from fuzz.campaign.journal import difference
from fuzz.campaign.store import (
    FILE,
    LOCK,
    Key,
    Store,
    StoreError,
    read_only,
    reader,
    told,
    transaction,
    understood,
    writer,
)
from fuzz.errors import Exit

_ROWS = {
    "results": 'target, round, idx, origin, "case", verdict, worst_ratio, result, seconds, harness',
    "reached": "target, round, idx, what",
    "rounds": "target, round, shard, cases",
    "corpus": "target, round, idx, reason",
}
"""Columns beside the campaign of tables whose rows are the same in every store that has them."""

_FINDING = (
    *("fault", "id", "signature", "known", "target", "round", "idx", "size", "data"),
    *("severity", "reachability", "minimised"),
)


def merge(folders: Sequence[Path], out: Path) -> Store:
    """Join the stores of ``folders`` into that of ``out``, which may have one already; returns it, open.

    What several hold is there once. Raises ``StoreError`` where they cannot belong together: their last campaigns
    differ in anything but their shard, or one case has two shapes.
    """
    belong(folders)
    made, fresh = not out.exists(), not (out / FILE).exists()
    store = writer(out)
    try:
        if store.campaigns():
            with reader(folders[0]) as first:
                _same_campaign(first, store)
        for folder in folders:
            try:
                _take(store, folder)
            except StoreError as error:
                where = "" if str(folder / FILE) in str(error) else f"{folder / FILE}: cannot be joined: "
                raise StoreError(error.code, f"{where}{error}") from None
    except BaseException:
        store.close()
        if fresh:
            _remove(out, made)
        raise
    return store


def belong(folders: Sequence[Path]) -> None:
    """Raise ``StoreError`` where the stores of ``folders`` are not parts of one run."""
    with ExitStack() as readers:
        stores = [readers.enter_context(reader(folder)) for folder in folders]
        for store in stores:
            if not store.campaigns():
                raise StoreError(Exit.USAGE, f"{store.path}: holds no run")
        for store in stores[1:]:
            _same_campaign(stores[0], store)


def _remove(out: Path, made: bool) -> None:
    """Leave nothing of a store that was made here and holds nothing that anybody asked for."""
    with suppress(OSError):
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm", LOCK):
            (out / name).unlink(missing_ok=True)
        if made:
            out.rmdir()


def _same_campaign(one: Store, other: Store) -> None:
    ours, theirs = one.campaigns()[-1].settings, other.campaigns()[-1].settings
    changed = [name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)]
    if changed:
        reason = difference(ours, theirs, changed[0])
        raise StoreError(Exit.USAGE, f"{other.path}: no part of the run of {one.path}: {reason}")


def _take(store: Store, folder: Path) -> None:
    if (folder / FILE).resolve() == store.path.resolve():
        return
    with told(store.path):
        store.connection.execute("ATTACH ? AS other", (read_only(folder / FILE),))
        try:
            with transaction(store.connection):
                rows = store.connection.execute("SELECT id, identity, ordinal, settings, finished FROM other.campaigns")
                for campaign in rows.fetchall():
                    _take_campaign(store.connection, campaign, folder)
        finally:
            store.connection.execute("DETACH other")


def _take_campaign(connection: sqlite3.Connection, campaign: tuple[Any, ...], folder: Path) -> None:
    theirs, identity, ordinal, settings, finished = campaign
    connection.execute(
        "INSERT INTO campaigns (identity, ordinal, settings, finished) VALUES (?, ?, ?, ?)"
        " ON CONFLICT DO UPDATE SET finished = min(finished, excluded.finished)",
        (identity, ordinal, settings, finished),
    )
    (ours,) = connection.execute(
        "SELECT id FROM campaigns WHERE identity = ? AND ordinal = ?", (identity, ordinal)
    ).fetchone()
    clash = connection.execute(
        "SELECT target, round, idx FROM results AS a JOIN other.results AS b USING (target, round, idx)"
        ' WHERE a.campaign = ? AND b.campaign = ? AND a."case" <> b."case"',
        (ours, theirs),
    ).fetchone()
    if clash is not None:
        raise StoreError(Exit.USAGE, f"{folder / FILE}: {Key(*clash).said}: another case than another store has there")
    for table, columns in _ROWS.items():
        connection.execute(
            f"INSERT OR IGNORE INTO {table} (campaign, {columns}) SELECT ?, {columns} FROM other.{table}"
            " WHERE campaign = ?",
            (ours, theirs),
        )
    columns = ", ".join(_FINDING)
    for row in connection.execute(f"SELECT {columns} FROM other.findings WHERE campaign = ?", (theirs,)).fetchall():
        _take_finding(connection, ours, dict(zip(_FINDING, row, strict=True)), folder / FILE)
    connection.execute(
        "INSERT OR IGNORE INTO failures (campaign, fault, target, round, idx) SELECT ?, fault, target, round, idx"
        " FROM other.failures WHERE campaign = ?",
        (ours, theirs),
    )
    connection.execute(
        "INSERT OR IGNORE INTO nights (key, campaign, began, ended, interrupted, report)"
        " SELECT key, ?, began, ended, interrupted, report FROM other.nights WHERE campaign = ?",
        (ours, theirs),
    )


def _take_finding(connection: sqlite3.Connection, campaign: int, row: Mapping[str, Any], path: Path) -> None:
    """Show a fault on the smaller of two cases, and made into the smaller of two; what a person said of it stays."""
    before = connection.execute(
        f"SELECT {', '.join(_FINDING)} FROM findings WHERE campaign = ? AND fault = ?", (campaign, row["fault"])
    ).fetchone()
    if before is not None:
        ours = dict(zip(_FINDING, before, strict=True))
        with understood(path, "findings"):
            smaller, other = sorted((ours, row), key=_place)
            said = {name: other[name] for name in ("severity", "reachability") if smaller[name] is None}
            row = {**smaller, **said, "minimised": _smaller(ours["minimised"], row["minimised"])}
        sets = ", ".join(f"{name} = ?" for name in _FINDING[1:])
        values = [row[name] for name in _FINDING[1:]]
        connection.execute(
            f"UPDATE findings SET {sets} WHERE campaign = ? AND fault = ?", (*values, campaign, row["fault"])
        )
        return
    marks = ", ".join("?" for _ in _FINDING)
    connection.execute(
        f"INSERT INTO findings (campaign, {', '.join(_FINDING)}) VALUES (?, {marks})",
        (campaign, *(row[name] for name in _FINDING)),
    )


def _smaller(one: str | None, other: str | None) -> str | None:
    """Of two findings as text, that with the smaller case; the same whichever comes first."""
    there = [text for text in (one, other) if text is not None]
    return min(there, key=lambda text: (saved_finding(json.loads(text)).size, text), default=None)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return json.loads(row["size"]), row["round"], row["idx"]
