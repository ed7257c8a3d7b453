"""Which rank never entered which collective, from the place that each rank noted last."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine.collective_log import (
    SIZE_BYTES,
    Place,
    PlaceFile,
    Recorded,
    find_mismatch,
    find_missing,
    place_path,
    read_place,
)
from harness.recorder.collectives import fitting

ALL = (0, 1, 2, 3)


def place(entered: dict[str, int], group: tuple[int, ...] = ALL, *, inside: bool = True) -> Place:
    return Place(
        step=7, operator="c10d::_allgather_base_", label="layers.1", group=group,
        is_inside=inside, entered=entered,
    )  # fmt: skip


WAITING = place({"0,1,2,3": 12})
ABSENT = place({"0,1,2,3": 11}, inside=False)


def test_the_rank_that_never_entered_is_named_with_the_collective() -> None:
    """Three wait in the twelfth collective of all ranks, which the fourth has not called."""
    missing = find_missing({0: WAITING, 1: WAITING, 2: ABSENT, 3: WAITING})
    assert missing is not None
    assert missing.ranks == (2,)
    assert str(missing) == (
        "rank 2 never entered allgather_base of layers.1 in step 7 (collective 12 of ranks 0,1,2,3)"
    )


def test_who_waits_elsewhere_for_the_same_rank_is_not_at_fault() -> None:
    """0 waits for 1, which waits for 3: 3 is at fault."""
    places = {
        0: place({"0,1": 5}, (0, 1)),
        1: place({"0,1": 4, "1,3": 9}, (1, 3)),
        3: place({"1,3": 8}, (1, 3), inside=False),
    }
    missing = find_missing(places)
    assert missing is not None
    assert (missing.ranks, missing.expected.group, missing.number) == ((3,), (1, 3), 9)


@pytest.mark.parametrize(
    "places",
    [
        {},
        {0: WAITING, 1: WAITING},
        {0: ABSENT, 2: ABSENT},
        {0: WAITING},
        # Each waits for the other: neither is outside of a collective.
        {0: place({"0,1": 5, "0,1,2,3": 1}, (0, 1)), 1: place({"0,1": 4, "0,1,2,3": 2})},
    ],
    ids=["nobody", "all inside", "none inside", "the others unknown", "a circle"],
)
def test_nobody_is_accused_without_evidence(places: dict[int, Place]) -> None:
    """Where places do not single anybody out, nobody is named."""
    assert find_missing(places) is None


def other(operator: str = "c10d::_allgather_base_", label: str = "layers.1") -> Place:
    return replace(WAITING, operator=operator, label=label)


def test_the_rank_in_another_collective_is_named() -> None:
    """Three gather where the fourth reduces: one call was wrong, and each waits for the others."""
    mismatch = find_mismatch({0: WAITING, 1: WAITING, 2: WAITING, 3: other("c10d::allreduce_")})
    assert mismatch is not None
    assert mismatch.odd_one == 3
    assert str(mismatch) == (
        "rank 3 entered allreduce of layers.1 where ranks 0, 1, 2 entered allgather_base of "
        "layers.1 in step 7 (collective 12 of ranks 0,1,2,3)"
    )


def test_the_rank_that_left_a_collective_out_is_named() -> None:
    """The same operator of another unit: it is a collective ahead."""
    mismatch = find_mismatch({0: WAITING, 1: other(label="layers.2"), 3: WAITING})
    assert mismatch is not None
    assert mismatch.odd_one == 1
    assert "rank 1 entered allgather_base of layers.2 where ranks 0, 3" in str(mismatch)


def test_of_two_that_disagree_neither_is_accused() -> None:
    """Both are told of, and the collective; which was due cannot be known."""
    mismatch = find_mismatch({0: WAITING, 1: other("c10d::allreduce_")})
    assert mismatch is not None
    assert mismatch.odd_one is None
    assert {mismatch.ranks, mismatch.others} == {(0,), (1,)}


def recent(*operators: str, first: int = 10, sizes: str = "") -> tuple[Recorded, ...]:
    return tuple(
        Recorded(key="0,1,2,3", number=number, operator=operator, sizes=sizes, step=5)
        for number, operator in enumerate(operators, first)
    )


def test_the_first_collective_that_ranks_entered_differently_is_named() -> None:
    """NCCL's host goes on: both wait in an all_reduce, which is not where they parted."""
    reduces = replace(WAITING, operator="all_reduce")
    places = {
        0: replace(reduces, recent=recent("all_gather", "broadcast", "all_reduce")),
        1: replace(reduces, recent=recent("all_reduce", "broadcast", first=11)),
        2: replace(reduces, recent=recent("all_gather", "broadcast", "all_reduce")),
    }
    mismatch = find_mismatch(places)
    assert mismatch is not None
    fault = mismatch.record
    assert (fault.ranks, fault.others, fault.number, fault.step) == ((1,), (0, 2), 11, 5)
    assert fault.entered is not None
    assert (fault.entered.operator, fault.expected.operator) == ("all_reduce", "broadcast")


def test_what_ranks_recorded_alike_is_no_mismatch() -> None:
    """Buffers that begin elsewhere, sizes that one rank did not record."""
    places = {
        0: replace(ABSENT, recent=recent("all_gather", "broadcast", sizes="[[8]]")),
        1: replace(ABSENT, recent=recent("broadcast", "all_reduce", first=11)),
    }
    assert find_mismatch(places) is None


@pytest.mark.parametrize(
    "places",
    [
        {0: WAITING, 1: WAITING},
        {0: WAITING, 1: other(label="")},
        {0: WAITING, 1: replace(other("c10d::allreduce_"), is_inside=False)},
        {0: WAITING, 1: replace(other("c10d::allreduce_"), entered={"0,1,2,3": 13})},
        {0: WAITING, 1: replace(other("c10d::allreduce_"), group=(1, 3))},
        {0: other("c10d::send"), 1: replace(other(""), group=())},
    ],
    ids=["agree", "unknown owner", "came back", "another number", "another group", "no group"],
)
def test_ranks_that_may_agree_are_no_mismatch(places: dict[int, Place]) -> None:
    """Only ranks that wait in the same place of the same group can disagree."""
    assert find_mismatch(places) is None


def test_a_place_is_there_whatever_becomes_of_the_writer(tmp_path: Path) -> None:
    """The last one written is read while the file is open; a shorter one leaves nothing behind."""
    path = place_path(tmp_path, 3)
    assert read_place(path) is None
    file = PlaceFile(path)
    assert read_place(path) is None
    file.write(WAITING)
    assert read_place(path) == WAITING
    file.write(replace(WAITING, label="", entered={}))
    assert read_place(path) == replace(WAITING, label="", entered={})
    file.write(replace(WAITING, label="x" * SIZE_BYTES))
    assert read_place(path) == replace(WAITING, label="", entered={})
    file.remove()
    assert not path.exists()


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"step": 1', b"[]\n"])
def test_a_damaged_place_is_none(tmp_path: Path, text: bytes) -> None:
    """A rank that was killed as it wrote says nothing, and breaks nothing."""
    path = place_path(tmp_path, 0)
    path.write_bytes(text)
    assert read_place(path) is None


@pytest.mark.parametrize("ranks", [8, 200, 1000])
def test_an_answer_is_as_long_as_the_leader_reads(ranks: int, tmp_path: Path) -> None:
    """Of groups of many ranks it names fewer collectives, the latest; its place is there."""
    key = ",".join(map(str, range(ranks)))
    told = [
        {"key": key, "number": number, "operator": "all_reduce", "step": 3} for number in range(32)
    ]
    place = {
        "step": 3, "operator": "all_reduce", "label": "", "group": list(range(ranks)),
        "is_inside": True, "entered": {key: 31}, "recent": told,
    }  # fmt: skip
    path = tmp_path / "rank0.answer"
    path.write_text(fitting(place))
    found = read_place(path)
    assert found is not None
    numbers = [each.number for each in found.recent]
    assert numbers == list(range(32))[32 - len(numbers) :]
    assert (len(numbers) == 32) == (ranks == 8)
