"""Checksums that files carry, so that damage after they were written is noticed.

    one object   {..., "sha256": of all other keys as one line of JSON with sorted keys}
    rank file    the end record's `sha256`: of every byte before its line, then of the rest of it

They tell damage, not forgery: whoever can write a file can write its checksum. Against a verdict
that says what its records do not, only judging again helps (`harness.rejudge`). A file without
a checksum is damaged.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from harness.records import EndRecord, Json, RecordError, dumps

KEY = "sha256"


def with_checksum(value: Json | Mapping[str, Any]) -> dict[str, Any]:
    """What a file that holds one object holds: the object and its checksum."""
    plain = value.to_json() if isinstance(value, Json) else dict(value)
    return plain | {KEY: _of(plain)}


def without_checksum(plain: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of a file, once its checksum has been found to fit.

    Raises:
        RecordError: it does not, or there is none.
    """
    rest = {key: value for key, value in plain.items() if key != KEY}
    if KEY not in plain:
        raise RecordError(f"{name}: its checksum is gone")
    try:
        found = _of(rest)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{name}: {error}") from error
    if plain[KEY] != found:
        raise RecordError(f"{name}: changed since it was written: its checksum does not fit")
    return rest


def _of(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(dumps(plain).encode()).hexdigest()


class LinesChecksum:
    """Checksum of a rank's file, line by line."""

    def __init__(self) -> None:
        """Nothing written yet."""
        self._before = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Take in what was written, or read, next."""
        self._before.update(data)

    def sealed(self, end: EndRecord) -> EndRecord:
        """The end record with the checksum of all that was added, and of itself."""
        plain = dataclasses.replace(end, sha256="")
        digest = self._before.copy()
        digest.update(dumps(plain).encode())
        return dataclasses.replace(plain, sha256=digest.hexdigest())
