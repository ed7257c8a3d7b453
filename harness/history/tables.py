"""The tables of the database, version by version, and rows that are entries.

    folders   a row a run folder
    cases     a row an answer for a case
    runs      a row an attempt of a training run

Every row has a digest of what it says: one that does not bear it out is damaged. Rows are only ever
added. `MIGRATIONS[n]` takes a database of version n to version n + 1; version 0 is an empty one.
"""

import dataclasses
import json
import sqlite3
from typing import Any, TypeVar

from harness.history.entries import CaseEntry, FolderEntry, RunEntry, default_of, digest_of
from harness.records import Difference, Json

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE folders (
            id TEXT NOT NULL PRIMARY KEY, scenario TEXT NOT NULL, created TEXT NOT NULL,
            num_cases INTEGER NOT NULL, "commit" TEXT NOT NULL, shard TEXT NOT NULL,
            tier TEXT NOT NULL, device TEXT NOT NULL, machine TEXT NOT NULL,
            slots INTEGER NOT NULL, environment TEXT NOT NULL, fingerprints TEXT NOT NULL,
            digest TEXT NOT NULL)""",
        """CREATE TABLE cases (
            folder TEXT NOT NULL REFERENCES folders (id), case_id TEXT NOT NULL,
            attempt INTEGER NOT NULL, outcome TEXT NOT NULL, what TEXT NOT NULL,
            message TEXT NOT NULL, labels TEXT NOT NULL, causes TEXT NOT NULL, difference TEXT,
            reference TEXT NOT NULL, control TEXT NOT NULL, candidate TEXT NOT NULL,
            wall_s REAL NOT NULL, digest TEXT NOT NULL,
            PRIMARY KEY (folder, case_id, attempt))""",
        """CREATE TABLE runs (
            folder TEXT NOT NULL REFERENCES folders (id), "key" TEXT NOT NULL,
            attempt INTEGER NOT NULL, work TEXT NOT NULL, what TEXT NOT NULL,
            device TEXT NOT NULL, world_size INTEGER NOT NULL, preset TEXT NOT NULL,
            steps INTEGER NOT NULL, started_unix_s REAL NOT NULL, wall_s REAL NOT NULL,
            fingerprint TEXT NOT NULL, problems INTEGER NOT NULL, startup_s REAL, step_s REAL,
            step_spread_s REAL, timed_steps INTEGER NOT NULL, peak_bytes INTEGER,
            replays INTEGER NOT NULL, loss_bits TEXT NOT NULL, digest TEXT NOT NULL,
            PRIMARY KEY (folder, "key", attempt))""",
        """CREATE INDEX folders_of_scenario ON folders (scenario, created)""",
        """CREATE INDEX cases_by_id ON cases (case_id)""",
        """CREATE INDEX runs_by_work ON runs (work)""",
    ),
    ("""ALTER TABLE runs ADD COLUMN state_bits TEXT NOT NULL DEFAULT ''""",),
    (
        """ALTER TABLE cases ADD COLUMN retried TEXT NOT NULL DEFAULT '[]'""",
        """ALTER TABLE cases ADD COLUMN inputs TEXT NOT NULL DEFAULT ''""",
    ),
    (
        """ALTER TABLE cases ADD COLUMN "commit" TEXT NOT NULL DEFAULT ''""",
        """ALTER TABLE runs ADD COLUMN "commit" TEXT NOT NULL DEFAULT ''""",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)

Entry = TypeVar("Entry", CaseEntry, RunEntry, FolderEntry)
TABLES: dict[type[Json], str] = {CaseEntry: "cases", RunEntry: "runs", FolderEntry: "folders"}
_NOT_COLUMNS = ("cases", "runs")
_COLUMNS: dict[type[Json], tuple[str, ...]] = {
    kind: tuple(f.name for f in dataclasses.fields(kind) if f.name not in _NOT_COLUMNS)
    for kind in (CaseEntry, RunEntry, FolderEntry)
}
_AS_JSON = ("labels", "causes", "retried", "difference", "environment", "fingerprints")


class DamagedRow(ValueError):
    """A row whose digest does not fit what it says."""


def column_names(kind: type[Json]) -> tuple[str, ...]:
    """Columns that hold an entry of this kind, in the order of its fields."""
    return _COLUMNS[kind]


def values_of(entry: Json) -> list[Any]:
    """An entry's columns, and its digest."""
    values = [_stored(name, getattr(entry, name)) for name in column_names(type(entry))]
    return [*values, digest_of(_alone(entry))]


def entry_of(kind: type[Entry], row: sqlite3.Row, digest: str = "digest") -> Entry:
    """The entry that a row holds.

    Raises:
        DamagedRow: the row does not say what was written.
    """
    try:
        values = {name: row[name] for name in column_names(kind)}
        for name in _AS_JSON:
            if values.get(name) is not None:
                values[name] = _read(name, values[name])
        entry = kind(**values)
        borne_out = digest_of(entry) == row[digest]
    except (ValueError, TypeError, LookupError) as error:
        raise DamagedRow(str(error)) from error
    if not borne_out:
        raise DamagedRow("its digest does not fit")
    return entry


def says_no_other(stored: Entry, entry: Entry) -> bool:
    """Whether `stored` agrees with `entry` in every column in which it says anything."""
    return all(
        (mine := getattr(stored, f.name)) == getattr(entry, f.name) or mine == default_of(f)
        for f in dataclasses.fields(stored)
        if f.name not in _NOT_COLUMNS
    )


def identity_of(entry: Json, owner: str | None) -> dict[str, object]:
    """The columns by which an entry's row is found; `owner` is the id of its folder."""
    if isinstance(entry, CaseEntry):
        return {"folder": owner, "case_id": entry.case_id, "attempt": entry.attempt}
    if isinstance(entry, RunEntry):
        return {"folder": owner, "key": entry.key, "attempt": entry.attempt}
    assert isinstance(entry, FolderEntry)
    return {"id": entry.id}


def insert(kind: type[Json], *, owned: bool) -> str:
    """The statement that adds a row unless there is one of its identity."""
    names = [*(["folder"] if owned else []), *column_names(kind), "digest"]
    quoted = ", ".join(f'"{name}"' for name in names)
    marks = ", ".join("?" for _ in names)
    return f"INSERT OR IGNORE INTO {TABLES[kind]} ({quoted}) VALUES ({marks})"


def _alone(entry: Json) -> Json:
    """The entry without those that are rows of their own."""
    if isinstance(entry, FolderEntry):
        return dataclasses.replace(entry, cases=(), runs=())
    return entry


def _stored(name: str, value: Any) -> Any:
    if name not in _AS_JSON or value is None:
        return value
    plain = value.to_json() if isinstance(value, Json) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read(name: str, value: Any) -> Any:
    plain = json.loads(value)
    if name in ("causes", "retried"):
        return tuple(plain)
    return Difference.from_json(plain) if name == "difference" else plain
