"""The durable record of campaigns: one SQLite file, which others may read while a campaign writes it.

Every change is one transaction, on disk when the method returns (WAL, synchronous=FULL): a process that is killed
loses nothing that was recorded, and a result is there whole or not at all. Rows are found by campaign, target, round
and index. No time is a key; those that are kept are for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from fuzz.errors import Exit, Expected, Stop, exit_of

FILE = "store.sqlite"
LOCK = "store.lock"

APPLICATION = 0x41744F72
"""``PRAGMA application_id``: tells a store from other SQLite files."""

_FROZEN = "?mode=ro&immutable=1"

BUSY_S = 30.0
"""How long a writer waits for another process that holds the file locked."""


class StoreError(Stop):
    """What is wrong with a store, in one line. ``code`` is 3 where it cannot be written any more, else 2."""


# ------------------------------------------------------------------- schema


def _to_1(connection: sqlite3.Connection) -> None:
    connection.execute(
        """CREATE TABLE campaigns (
            id INTEGER PRIMARY KEY,
            identity TEXT NOT NULL,
            ordinal INTEGER NOT NULL,
            settings TEXT NOT NULL,
            finished INTEGER NOT NULL DEFAULT 0,
            UNIQUE (identity, ordinal))"""
    )
    connection.execute(
        """CREATE TABLE nights (
            key TEXT PRIMARY KEY,
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            began TEXT NOT NULL,
            ended TEXT,
            interrupted INTEGER,
            report TEXT)"""
    )
    connection.execute(
        """CREATE TABLE results (
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            origin TEXT NOT NULL,
            "case" TEXT NOT NULL,
            verdict TEXT,
            worst_ratio REAL,
            result TEXT NOT NULL,
            seconds TEXT NOT NULL,
            harness TEXT,
            PRIMARY KEY (campaign, target, round, idx)) WITHOUT ROWID"""
    )
    connection.execute(
        """CREATE TABLE findings (
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            fault TEXT NOT NULL,
            id TEXT NOT NULL,
            signature TEXT NOT NULL,
            known TEXT,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            size TEXT NOT NULL,
            data TEXT NOT NULL,
            severity TEXT,
            reachability TEXT,
            minimised TEXT,
            PRIMARY KEY (campaign, fault),
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID"""
    )
    connection.execute(
        """CREATE TABLE failures (
            campaign INTEGER NOT NULL,
            fault TEXT NOT NULL,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            PRIMARY KEY (campaign, fault, target, round, idx),
            FOREIGN KEY (campaign, fault) REFERENCES findings,
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID"""
    )


def _to_2(connection: sqlite3.Connection) -> None:
    """What kernels reached, and the rounds with the corpus that they made."""
    connection.execute(
        """CREATE TABLE reached (
            campaign INTEGER NOT NULL,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            what TEXT NOT NULL,
            PRIMARY KEY (campaign, target, round, idx, what),
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID"""
    )
    connection.execute(
        """CREATE TABLE rounds (
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            shard INTEGER NOT NULL,
            cases INTEGER NOT NULL,
            PRIMARY KEY (campaign, target, round, shard)) WITHOUT ROWID"""
    )
    connection.execute(
        """CREATE TABLE corpus (
            campaign INTEGER NOT NULL,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            reason TEXT NOT NULL,
            PRIMARY KEY (campaign, target, round, idx, reason),
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID"""
    )


MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (_to_1, _to_2)
"""Step i makes schema i + 1 out of schema i. A schema that was released is never changed, only migrated."""

SCHEMA = len(MIGRATIONS)


# --------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Key:
    """Where a result belongs: the unique key of ``results``."""

    target: str
    round: int
    index: int

    @property
    def said(self) -> str:
        """For a line to a person."""
        return f"{self.target}, round {self.round}, case {self.index}"


@dataclass(frozen=True)
class Result:
    """One case of a campaign. ``case``, ``result``, ``seconds`` and ``harness`` are plain data of their classes.

    ``verdict`` is None where our own code failed: then ``harness`` says how. ``reached``: what its kernels reached
    and none had reached when its round began.
    """

    key: Key
    origin: str
    case: Mapping[str, Any]
    verdict: str | None
    worst_ratio: float | None
    result: Mapping[str, Any]
    seconds: Mapping[str, float]
    harness: Mapping[str, Any] | None
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Round:
    """A shard's part of a round that has all its results: how many, and by index why cases entered the corpus."""

    target: str
    round: int
    shard: int
    cases: int
    corpus: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class Found:
    """A finding as it goes into a store. ``fault`` tells faults apart, ``size`` orders their cases.

    ``data`` is ``Finding.to_dict()``.
    """

    fault: Sequence[str | None]
    size: Sequence[int]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class FindingRow:
    """One fault of a campaign, on the smallest case that showed it, and how many cases did.

    ``severity`` and ``reachability`` are for a person to fill; ``minimised`` is a finding's plain data, or None.
    """

    id: str
    fault: tuple[str | None, ...]
    key: Key
    data: Mapping[str, Any]
    cases: int
    severity: str | None
    reachability: str | None
    minimised: Mapping[str, Any] | None


@dataclass(frozen=True)
class CampaignRow:
    """A campaign: ``settings`` is what its cases depend on. ``ordinal`` counts those of the same settings."""

    id: int
    ordinal: int
    settings: Mapping[str, Any]
    finished: bool
    results: int


@dataclass(frozen=True)
class Night:
    """One run of a process on a campaign. ``report`` is the object that ``--json`` prints, None if it was killed."""

    key: str
    campaign: int
    began: str
    ended: str | None
    interrupted: bool
    report: Mapping[str, Any] | None


# -------------------------------------------------------------------- store


class Store:
    """The store of one folder. Use ``writer`` and ``reader`` to open it, and it as a context manager."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.connection = connection
        self._lock = lock

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. What was recorded is on disk already."""
        self.connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------- campaigns

    def campaigns(self) -> list[CampaignRow]:
        """All campaigns, the newest last."""
        rows = self._read(
            "SELECT id, ordinal, settings, finished, (SELECT count(*) FROM results WHERE campaign = id)"
            " FROM campaigns ORDER BY id"
        )
        with understood(self.path, "campaigns"):
            return [CampaignRow(i, ordinal, _dict(text), bool(done), count) for i, ordinal, text, done, count in rows]

    def begin(self, settings: Mapping[str, Any]) -> int:
        """A new campaign; returns its id."""
        identity = _text(settings)
        with self._transaction() as connection:
            (ordinal,) = connection.execute(
                "SELECT coalesce(max(ordinal), 0) + 1 FROM campaigns WHERE identity = ?", (identity,)
            ).fetchone()
            made = connection.execute(
                "INSERT INTO campaigns (identity, ordinal, settings) VALUES (?, ?, ?)", (identity, ordinal, identity)
            )
            assert made.lastrowid is not None
            return made.lastrowid

    def begin_night(self, campaign: int) -> str:
        """Note that a process works on a campaign from now on; returns the night's key."""
        key = uuid.uuid4().hex
        with self._transaction() as connection:
            connection.execute("UPDATE campaigns SET finished = 0 WHERE id = ?", (campaign,))
            connection.execute("INSERT INTO nights (key, campaign, began) VALUES (?, ?, ?)", (key, campaign, _now()))
        return key

    def end_night(self, key: str, report: Mapping[str, Any], interrupted: bool) -> None:
        """Note how a night ended. Unless it was interrupted, the campaign has done what was asked of it."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE nights SET ended = ?, interrupted = ?, report = ? WHERE key = ?",
                (_now(), interrupted, _text(report), key),
            )
            connection.execute(
                "UPDATE campaigns SET finished = ? WHERE id = (SELECT campaign FROM nights WHERE key = ?)",
                (not interrupted, key),
            )

    def nights(self) -> list[Night]:
        """All nights in the order in which they began."""
        rows = self._read("SELECT key, campaign, began, ended, interrupted, report FROM nights ORDER BY rowid")
        with understood(self.path, "nights"):
            return [
                Night(key, campaign, began, ended, ended is None or bool(interrupted), _data(report))
                for key, campaign, began, ended, interrupted, report in rows
            ]

    # --------------------------------------------------------------- results

    def add(self, campaign: int, result: Result, found: Sequence[Found], closed: Round | None = None) -> None:
        """Record a case with its findings, and the round if this was its last case. A case can have one result."""
        with self._transaction() as connection:
            _insert_result(connection, campaign, result)
            for finding in found:
                _insert_finding(connection, campaign, result.key, finding)
            if closed is not None:
                _insert_round(connection, campaign, closed)

    def results(self, campaign: int, target: str | None = None) -> Iterator[Result]:
        """The results of a campaign by target, round and index."""
        where, values = ("", (campaign,)) if target is None else (" AND target = ?", (campaign, target))
        reached = self._reached(campaign)
        sql = (
            'SELECT target, round, idx, origin, "case", verdict, worst_ratio, result, seconds, harness'
            f" FROM results WHERE campaign = ?{where} ORDER BY target, round, idx"
        )
        with told(self.path):
            for name, round_, index, origin, case, verdict, ratio, result, seconds, harness in self.connection.execute(
                sql, values
            ):
                key = Key(name, round_, index)
                with understood(self.path, key.said):
                    plain = _dict(case), verdict, ratio, _dict(result), _dict(seconds), _data(harness)
                yield Result(key, origin, *plain, frozenset(reached.get(key, ())))

    def _reached(self, campaign: int) -> dict[Key, set[str]]:
        found: dict[Key, set[str]] = {}
        for *key, what in self._read("SELECT target, round, idx, what FROM reached WHERE campaign = ?", (campaign,)):
            found.setdefault(Key(*key), set()).add(what)
        return found

    def rounds(self, campaign: int) -> list[Round]:
        """The rounds of a campaign that have all their results, by target, round and shard."""
        entries = self._read("SELECT target, round, idx, reason FROM corpus WHERE campaign = ?", (campaign,))
        (settings,) = self._read("SELECT settings FROM campaigns WHERE id = ?", (campaign,))[0]
        with understood(self.path, "campaigns"):
            shards = _dict(settings)["shards"]
        corpus: dict[tuple[str, int, int], dict[int, list[str]]] = {}
        for target, round_, index, reason in entries:
            corpus.setdefault((target, round_, index % shards + 1), {}).setdefault(index, []).append(reason)
        rows = self._read(
            "SELECT target, round, shard, cases FROM rounds WHERE campaign = ? ORDER BY target, round, shard",
            (campaign,),
        )
        return [Round(name, i, shard, cases, corpus.get((name, i, shard), {})) for name, i, shard, cases in rows]

    def findings(self, campaign: int) -> list[FindingRow]:
        """One row a fault, in the order in which their smallest cases were asked for."""
        rows = self._read(
            "SELECT id, fault, target, round, idx, data, (SELECT count(*) FROM failures"
            " WHERE failures.campaign = findings.campaign AND failures.fault = findings.fault),"
            " severity, reachability, minimised FROM findings WHERE campaign = ? ORDER BY round, idx, target, fault",
            (campaign,),
        )
        with understood(self.path, "findings"):
            return [
                FindingRow(
                    i,
                    tuple(json.loads(fault)),
                    Key(target, round_, index),
                    _dict(data),
                    n,
                    severity,
                    reach,
                    _data(small),
                )
                for i, fault, target, round_, index, data, n, severity, reach, small in rows
            ]

    def fill(self, finding: str, *, severity: str | None = None, reachability: str | None = None) -> None:
        """What a person says of a finding, by its id. What is None stays. Raises ``StoreError`` for an unknown id."""
        self._update(
            finding,
            "severity = coalesce(?, severity), reachability = coalesce(?, reachability)",
            (severity, reachability),
        )

    def set_minimised(self, finding: str, data: Mapping[str, Any]) -> None:
        """Keep the finding, as plain data, that a minimised case shows. Raises ``StoreError`` for an unknown id."""
        self._update(finding, "minimised = ?", (_text(data),))

    def _update(self, finding: str, what: str, values: Sequence[str | None]) -> None:
        with self._transaction() as connection:
            if not connection.execute(f"UPDATE findings SET {what} WHERE id = ?", (*values, finding)).rowcount:
                raise StoreError(Exit.USAGE, f"{self.path}: no finding {finding[:60]!r}")

    # ----------------------------------------------------------------- SQLite

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with told(self.path), transaction(self.connection):
            yield self.connection

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with told(self.path):
            return self.connection.execute(sql, values).fetchall()


def _insert_result(connection: sqlite3.Connection, campaign: int, row: Result) -> None:
    connection.execute(
        "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(campaign, row.key.target, row.key.round, row.key.index, row.origin, _text(row.case)),
            *(row.verdict, row.worst_ratio, _text(row.result), _text(row.seconds)),
            None if row.harness is None else _text(row.harness),
        ),
    )

    connection.executemany(
        "INSERT INTO reached VALUES (?, ?, ?, ?, ?)",
        [(campaign, row.key.target, row.key.round, row.key.index, what) for what in sorted(row.reached)],
    )


def _insert_round(connection: sqlite3.Connection, campaign: int, row: Round) -> None:
    connection.execute(
        "INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", (campaign, row.target, row.round, row.shard, row.cases)
    )
    connection.executemany(
        "INSERT INTO corpus VALUES (?, ?, ?, ?, ?)",
        [(campaign, row.target, row.round, i, reason) for i, reasons in row.corpus.items() for reason in reasons],
    )


def _insert_finding(connection: sqlite3.Connection, campaign: int, key: Key, found: Found) -> None:
    """Add a failure, and show the fault on this case if none is smaller. What a person said of a fault stays."""
    fault, where = json.dumps(list(found.fault)), (key.target, key.round, key.index)
    before = connection.execute(
        "SELECT size, round, idx FROM findings WHERE campaign = ? AND fault = ?", (campaign, fault)
    ).fetchone()
    place = (list(found.size), key.round, key.index)
    shown = (found.data["id"], _text(found.data["signature"]), found.data["known"], *where)
    if before is None:
        connection.execute(
            "INSERT INTO findings (campaign, fault, id, signature, known, target, round, idx, size, data,"
            " severity, reachability) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (campaign, fault, *shown, json.dumps(found.size), _text(found.data), *_said(connection, fault)),
        )
    elif place < (json.loads(before[0]), *before[1:]):
        connection.execute(
            "UPDATE findings SET id = ?, signature = ?, known = ?, target = ?, round = ?, idx = ?, size = ?, data = ?"
            " WHERE campaign = ? AND fault = ?",
            (*shown, json.dumps(found.size), _text(found.data), campaign, fault),
        )
    connection.execute("INSERT INTO failures VALUES (?, ?, ?, ?, ?)", (campaign, fault, *where))


def _said(connection: sqlite3.Connection, fault: str) -> tuple[str | None, str | None]:
    """Severity and reachability of the same fault in the newest campaign that has it."""
    row = connection.execute(
        "SELECT severity, reachability FROM findings WHERE fault = ? ORDER BY campaign DESC LIMIT 1", (fault,)
    ).fetchone()
    return (None, None) if row is None else row


# ------------------------------------------------------------------- opening


def writer(folder: Path, busy_s: float = BUSY_S) -> Store:
    """Open the store of ``folder`` to write it, made and brought to our schema if need be.

    Raises ``StoreError``: the folder cannot be written, another process writes the store, it is none of ours.
    """
    path = folder / FILE
    lock = _locked(folder)
    try:
        with told(path):
            # As a URI, so that others can be attached as such.
            connection = sqlite3.connect(_uri(path, ""), uri=True, timeout=busy_s, isolation_level=None)
        try:
            with told(path):
                _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        os.close(lock)
        raise
    return Store(folder, connection, lock)


def reader(folder: Path) -> Store:
    """Open the store of ``folder`` to read it, also while another process writes it. Raises ``StoreError``."""
    path = folder / FILE
    if not path.is_file():
        raise StoreError(Exit.USAGE, f"{path}: there is no store")
    with told(path):
        connection = _opened(path)
    try:
        with told(path):
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
            found = _schema(connection, path)
        if found != SCHEMA:
            reason = f"schema {found}; this release reads {SCHEMA}: attn-oracle fuzz --resume brings it there"
            raise StoreError(Exit.USAGE, f"{path}: {reason}")
    except BaseException:
        connection.close()
        raise
    return Store(folder, connection, None)


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(read_only(path), uri=True, isolation_level=None)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise
        # No room for the file beside it, and no log that would need it: then the store itself holds everything.
        return sqlite3.connect(_uri(path, _FROZEN), uri=True, isolation_level=None)
    return connection


def read_only(path: Path) -> str:
    """The URI that opens a store to read it."""
    # Reading a write-ahead log needs a file beside it; where none can be made, nobody writes either.
    return _uri(path, "?mode=ro" if os.access(path.parent, os.W_OK) else _FROZEN)


def _uri(path: Path, options: str) -> str:
    return path.resolve().as_uri() + options


def _locked(folder: Path) -> int:
    """A descriptor that keeps other writers away for as long as it is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(exit_of(error), f"--out {folder}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        message = f"{folder / FILE}: another run writes it; wait for its end or give another --out"
        raise StoreError(Exit.USAGE, message) from None
    return lock


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA foreign_keys = ON")
    if _schema(connection, path) == 0:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    with transaction(connection):
        for version in range(_schema(connection, path), SCHEMA):
            MIGRATIONS[version](connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _schema(connection: sqlite3.Connection, path: Path) -> int:
    """The schema of a store, 0 where the file is empty. Raises ``StoreError`` for what is no store that we read."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION and (tables or version or application):
        raise StoreError(Exit.USAGE, f"{path}: an SQLite file, but not a store of attn-oracle")
    if version > SCHEMA:
        raise StoreError(Exit.USAGE, f"{path}: schema {version}; this release reads up to {SCHEMA}: use a newer one")
    return int(version)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing: committed at the end, rolled back by whatever is raised."""
    if connection.in_transaction:  # one that a second Ctrl-C kept from being rolled back
        connection.execute("ROLLBACK")
    try:
        connection.execute("BEGIN IMMEDIATE")  # in here: Ctrl-C may come as soon as it has begun
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def told(path: Path) -> Iterator[None]:
    """SQLite's errors as ``StoreError``."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        exit_code, reason = _REASONS.get(code, (Exit.HARNESS, str(error)))
        raise StoreError(exit_code, f"{path}: {reason}") from None


@contextmanager
def understood(path: Path, where: str) -> Iterator[None]:
    """What the reader of a damaged row raises, as ``StoreError``. Only for code that turns rows into values."""
    try:
        yield
    except StoreError:
        raise
    except (Expected, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, Expected) else f"{type(error).__name__}: {str(error)[:80]}"
        raise StoreError(Exit.USAGE, f"{path}: {where}: damaged: {reason}") from None


_KEPT = "what was recorded is kept, and --resume goes on"
_REASONS = {
    sqlite3.SQLITE_NOTADB: (Exit.USAGE, "not a store of attn-oracle"),
    sqlite3.SQLITE_CORRUPT: (Exit.USAGE, "damaged: SQLite cannot read it"),
    sqlite3.SQLITE_CANTOPEN: (Exit.USAGE, "cannot be opened"),
    sqlite3.SQLITE_READONLY: (Exit.USAGE, "cannot be written"),
    sqlite3.SQLITE_BUSY: (Exit.HARNESS, f"another process holds it locked; {_KEPT}"),
    sqlite3.SQLITE_FULL: (Exit.HARNESS, f"the disk is full; {_KEPT}"),
    sqlite3.SQLITE_IOERR: (Exit.HARNESS, f"the disk fails or is full; {_KEPT}"),
}


def _text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _data(text: str | None) -> Mapping[str, Any] | None:
    return None if text is None else _dict(text)


def _dict(text: str) -> Mapping[str, Any]:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("no JSON object")
    return data


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
