"""The history itself: entries in, entries out, and as JSON lines for other machines.

record   an entry of a run folder, in one transaction; what is there already stays as it is
entries  every entry, oldest first, each row checked against its digest
export   a line for each entry, with its digest, after a line that names the format
load     the same lines in; a line that is damaged is told and left out
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.codec import strict_loads
from harness.errors import UsageError, one_line
from harness.history.database import open_database, refusals, transaction
from harness.history.entries import CaseEntry, FolderEntry, RunEntry, digest_of
from harness.history.tables import (
    SCHEMA_VERSION,
    TABLES,
    DamagedRow,
    Entry,
    entry_of,
    identity_of,
    insert,
    says_no_other,
    values_of,
)
from harness.records import Json, RecordError
from harness.store.files import open_plain

HEADER_KIND = "deltazero history"

MAX_LINE_BYTES = 1 << 30
"""Of an export: more than an entry has."""


@dataclass(frozen=True, kw_only=True)
class Recorded(Json):
    """What recording added. `differing`: rows that the history holds with other contents."""

    folders: int = 0
    cases: int = 0
    runs: int = 0
    differing: int = 0

    def __add__(self, other: "Recorded") -> "Recorded":
        return Recorded(
            folders=self.folders + other.folders, cases=self.cases + other.cases,
            runs=self.runs + other.runs, differing=self.differing + other.differing,
        )  # fmt: skip


class History:
    """An open history.

    Attributes:
        path: of the database.
        connection: to it, for queries.
        damaged: rows that were left out because their digest does not fit.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection
        self.damaged: list[str] = []

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open a history, or make one with `create`.

        Raises:
            HarnessError: see `open_database`.
        """
        return cls(path, open_database(path, create=create))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def record(self, entry: FolderEntry) -> Recorded:
        """Add what is new of a run folder. The first that was recorded of anything stands.

        Raises:
            Infrastructure: the disk refused, or others kept the history locked; nothing is added.
        """
        with transaction(self.connection, self.path):
            return self._record(entry)

    def _record(self, entry: FolderEntry) -> Recorded:
        folders, differing = self._add(FolderEntry, [entry], owner=None)
        cases, other_cases = self._add(CaseEntry, entry.cases, owner=entry.id)
        runs, other_runs = self._add(RunEntry, entry.runs, owner=entry.id)
        return Recorded(
            folders=folders, cases=cases, runs=runs,
            differing=differing + other_cases + other_runs,
        )  # fmt: skip

    def _add(
        self, kind: type[Entry], entries: Iterable[Entry], *, owner: str | None
    ) -> tuple[int, int]:
        """How many rows were added, and how many are there already and say something else."""
        statement = insert(kind, owned=owner is not None)
        added, differing = 0, 0
        for entry in entries:
            values: list[object] = [] if owner is None else [owner]
            values += values_of(entry)
            if self.connection.execute(statement, values).rowcount:
                added += 1
            else:
                differing += int(not self._holds(kind, entry, owner))
        return added, differing

    def _holds(self, kind: type[Entry], entry: Entry, owner: str | None) -> bool:
        """Whether the row of this identity says the same, as far as it says anything.

        A row of an older schema lacks what later ones record, and still says the same.
        """
        identity = identity_of(entry, owner)
        where = " AND ".join(f'"{name}" = ?' for name in identity)
        sql = f"SELECT * FROM {TABLES[kind]} WHERE {where}"
        return any(says_no_other(row, entry) for row in self.rows(kind, sql, identity.values()))

    def rows(self, kind: type[Entry], sql: str, values: Iterable[object] = ()) -> Iterator[Entry]:
        """The entries that a SELECT of whole rows finds; damaged ones are noted and left out."""
        for _, entry in self.owned_rows(kind, sql, values):
            yield entry

    def owned_rows(
        self, kind: type[Entry], sql: str, values: Iterable[object] = ()
    ) -> Iterator[tuple[str, Entry]]:
        """As `rows`, each with the id of its run folder."""
        owner = "id" if kind is FolderEntry else "folder"
        with refusals("read", self.path):
            for row in self.connection.execute(sql, tuple(values)):
                try:
                    yield str(row[owner]), entry_of(kind, row)
                except DamagedRow as error:
                    self.damaged.append(f"{TABLES[kind]}: {_identity(row)}: {error}")

    def entries(self) -> Iterator[FolderEntry]:
        """Every run folder, oldest first."""
        # One at a time: a reader that holds the whole history open would keep writers waiting.
        with refusals("read", self.path):
            found = self.connection.execute("SELECT id FROM folders ORDER BY created, id")
            ids = [row["id"] for row in found.fetchall()]
        for folder in ids:
            yield from self._entry(folder)

    def starting_with(self, name: str) -> list[FolderEntry]:
        """The run folders whose ids begin with `name`, at most two; none for an empty name."""
        with refusals("read", self.path):
            found = self.connection.execute(
                "SELECT id FROM folders WHERE substr(id, 1, ?) = ? ORDER BY id LIMIT 2",
                [len(name), name],
            )
            ids = [row["id"] for row in found.fetchall()] if name else []
        return [entry for folder in ids for entry in self._entry(folder)]

    def _entry(self, folder: str) -> Iterator[FolderEntry]:
        for alone in self.rows(FolderEntry, "SELECT * FROM folders WHERE id = ?", [folder]):
            cases = self.rows(
                CaseEntry, "SELECT * FROM cases WHERE folder = ? ORDER BY rowid", [folder]
            )
            runs = self.rows(
                RunEntry, "SELECT * FROM runs WHERE folder = ? ORDER BY rowid", [folder]
            )
            yield FolderEntry(
                **{name: getattr(alone, name) for name in alone.__dataclass_fields__
                   if name not in ("cases", "runs")},
                cases=tuple(cases), runs=tuple(runs),
            )  # fmt: skip

    def export(self) -> Iterator[str]:
        """The history as JSON lines, each with its line end."""
        yield _line({"kind": HEADER_KIND, "schema": SCHEMA_VERSION})
        for entry in self.entries():
            yield _line({"digest": digest_of(entry), "entry": entry.to_json()})

    def load(self, path: Path) -> tuple[Recorded, list[str]]:
        """Record what a file of JSON lines holds, in one transaction: a thousand runs take 2 s.

        Returns:
            What was added, and the lines that were left out, as 'line N: why'.

        Raises:
            UsageError: the file cannot be read, or is not of this format; nothing is added.
            Infrastructure: the history cannot be written; nothing is added.
        """
        added, problems = Recorded(), []
        with transaction(self.connection, self.path):
            for number, line in _numbered(path):
                self.connection.execute("SAVEPOINT line")
                try:
                    added += self._record(_parsed(line))
                except (ValueError, RecursionError) as error:
                    # Text that is no text is found as it is stored.
                    self.connection.execute("ROLLBACK TO line")
                    problems.append(f"line {number}: {one_line(str(error))}")
                self.connection.execute("RELEASE line")
        return added, problems


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of an export after its header, with their numbers."""
    try:
        with open_plain(path) as file:
            _check_header(path, file.readline(MAX_LINE_BYTES))
            number = 1
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                yield number, line
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _identity(row: sqlite3.Row) -> str:
    names = [name for name in ("folder", "id", "case_id", "key", "attempt") if name in row.keys()]  # noqa: SIM118 - a Row has values
    return " ".join(str(row[name]) for name in names)


def _line(plain: dict[str, object]) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != HEADER_KIND:
        raise UsageError(f"{path}: expected JSON lines of `harness history --export`, got others")
    schema = header.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        raise UsageError(
            f"{path} was written by a newer harness (schema {schema}, this one reads up to "
            f"{SCHEMA_VERSION})"
        )


def _parsed(line: bytes) -> FolderEntry:
    plain = strict_loads(line)
    if not isinstance(plain, dict) or set(plain) != {"digest", "entry"}:
        raise RecordError("expected an entry and its digest")
    entry = FolderEntry.from_json(plain["entry"])
    if digest_of(entry) != plain["digest"]:
        raise RecordError("its digest does not fit: the line was changed")
    return entry
