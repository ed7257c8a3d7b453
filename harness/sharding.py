"""A shard of what is run, and what its run folder says of the others.

The folder of a shard holds `shards.json`: every case of the whole matrix and the shard that it is
in. So whoever puts shards together knows what is missing, whichever shard was lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.checksum import with_checksum
from harness.disk import write_atomic
from harness.errors import NothingSelected, UsageError
from harness.expectations import expected_anywhere
from harness.object_file import read_object, told
from harness.records import CaseSpec, Json, RecordError, dumps
from harness.scenario.shards import Shard, cut, fingerprint, parse_shard
from harness.store import SHARDS_FILE


@dataclass(frozen=True, kw_only=True)
class Whole(Json):
    """The matrix that a shard is of.

    Attributes:
        shard: which one it is.
        cut: names the cut; shards of one cut hold every case once.
        cases: of all shards, in their order.
        shards: ids of the cases of each.
    """

    shard: Shard
    cut: str
    cases: tuple[CaseSpec, ...]
    shards: tuple[tuple[str, ...], ...]


def take_shard(
    cases: Sequence[CaseSpec], text: str, *, costs: Path | None, recorded_in: Path | None
) -> tuple[tuple[CaseSpec, ...], Whole]:
    """The cases of the shard `text`, and the whole that it is of.

    Args:
        cases: of all shards.
        text: I/N.
        costs: a history that costs are read from; None for estimates by size.
        recorded_in: where this run is recorded, None if nowhere.

    Raises:
        UsageError: no shard, or the history that costs are read from changes with each shard.
        NothingSelected: the shard holds no case.
    """
    shard = parse_shard(text)
    if costs is not None and recorded_in is not None and costs.resolve() == recorded_in.resolve():
        raise UsageError(
            f"--costs {costs}: expected a history that this run does not add to, or the next "
            f"shard is cut otherwise; copy it, or record elsewhere with --history"
        )
    shards = cut(cases, shard.number, expected_anywhere(costs))
    chosen = shards[shard.index - 1]
    if not chosen:
        filled = sum(map(bool, shards))
        raise NothingSelected(
            f"shard {shard} holds no case: those that share a reference stay together, so "
            f"{len(cases)} cases fill {filled} of {shard.number} shards (harness list --shards "
            f"{shard.number} --json names those)"
        )
    ids = tuple(tuple(case.id for case in held) for held in shards)
    return chosen, Whole(shard=shard, cut=fingerprint(shards), cases=tuple(cases), shards=ids)


def refuse_changed(cases: Sequence[CaseSpec]) -> NoReturn:
    """Refuse a shard of what has changed.

    What has changed is what a history says, and each shard adds to one: the next would be cut
    otherwise, and cases would be in none.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "--shard: expected select: all or pairwise, got changed: histories differ from shard to "
        "shard, and cases would be in none; add --select all, or leave out --shard"
    )


def keep_whole(folder: Path, whole: Whole) -> None:
    """Write what a shard's folder says of the others.

    Raises:
        Infrastructure: the disk refused.
    """
    write_atomic(folder / SHARDS_FILE, dumps(with_checksum(whole)) + "\n")


def load_whole(folder: Path) -> Whole | None:
    """What a run folder says of the matrix that it is a shard of; None if it is no shard.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return Whole.from_json(read_object(folder / SHARDS_FILE))
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as error:
        raise UsageError(f"{folder} is a damaged run folder: {told(error)}") from error
