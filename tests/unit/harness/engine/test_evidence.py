"""Where ranks were, by notes, answers and NCCL; what CUDA left; who kept whom waiting."""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine import evidence
from harness.engine.evidence import (
    Place,
    Recorded,
    answer_path,
    evidence_environment,
    fault_words,
    find_chain,
    find_mismatch,
    find_missing,
    last_place,
    odd_one,
    place_path,
    read_dump,
    read_place,
)
from harness.provenance import variables
from harness.recorder import PLACE_BYTES, PlaceFile
from harness.recorder.collectives import fitting
from harness.records import RunSpec
from harness.values import SoakSpec, dumps
from tests.unit.harness.engine.nccl_dump import GATHER, dump

ALL = (0, 1, 2, 3)


def place(entered: dict[str, int], group: tuple[int, ...] = ALL, *, inside: bool = True) -> Place:
    return Place(
        step=7, operator="c10d::_allgather_base_", label="layers.1", group=group,
        is_inside=inside, entered=entered,
    )  # fmt: skip


def recent(*operators: str, first: int = 10, sizes: str = "") -> tuple[Recorded, ...]:
    return tuple(
        Recorded(key="0,1,2,3", number=number, operator=operator, sizes=sizes, step=5)
        for number, operator in enumerate(operators, first)
    )


WAITING = place({"0,1,2,3": 12})
ABSENT = place({"0,1,2,3": 11}, inside=False)
REDUCES = replace(WAITING, operator="c10d::allreduce_")
WHOLE, PARTED = recent("all_gather", "broadcast", "all_reduce"), recent("all_reduce", first=11)
TWELFTH = "allgather_base of layers.1 in step 7 (collective 12 of ranks 0,1,2,3)"
NINTH = "allgather_base of layers.1 in step 7 (collective 9 of ranks 1,3)"
Row = tuple[dict[int, Place], str, int | None]
MISSING: dict[str, Row] = {
    "one is outside": (
        {0: WAITING, 1: WAITING, 2: ABSENT, 3: WAITING}, f"rank 2 never entered {TWELFTH}", 2,
    ),
    "0 waits for 1, which waits for 3": (
        {0: place({"0,1": 5}, (0, 1)), 1: place({"0,1": 4, "1,3": 9}, (1, 3)),
         3: place({"1,3": 8}, (1, 3), inside=False)}, f"rank 3 never entered {NINTH}", 3,
    ),
    "nobody is known": ({}, "", None),
    "all inside": ({0: WAITING, 1: WAITING}, "", None),
    "all entered, one is back": ({0: WAITING, 1: replace(WAITING, is_inside=False)}, "", None),
    "none inside": ({0: ABSENT, 2: ABSENT}, "", None),
    "the others unknown": ({0: WAITING}, "", None),
    "a circle": (
        {0: place({"0,1": 5, "0,1,2,3": 1}, (0, 1)), 1: place({"0,1": 4, "0,1,2,3": 2})}, "", None,
    ),
}  # fmt: skip
MISMATCH: dict[str, Row] = {
    "one call was another": (
        {0: WAITING, 1: WAITING, 2: WAITING, 3: REDUCES},
        f"rank 3 entered allreduce of layers.1 where ranks 0, 1, 2 entered {TWELFTH}", 3,
    ),
    "one was left out": (
        {0: WAITING, 1: replace(WAITING, label="layers.2"), 3: WAITING},
        f"rank 1 entered allgather_base of layers.2 where ranks 0, 3 entered {TWELFTH}", 1,
    ),
    "one has other sizes": (
        {0: replace(WAITING, sizes="[8]"), 1: replace(WAITING, sizes="[8]"),
         2: replace(WAITING, sizes="[4]", called_at="train.py:7 in main")},
        "rank 2 entered allgather_base of layers.1 of sizes [4], not [8], called at train.py:7 in "
        f"main, where ranks 0, 1 entered {TWELFTH}", 2,
    ),
    "which of two was due cannot be known": (
        {0: REDUCES, 1: WAITING},
        "rank 1 entered allgather_base of layers.1 where rank 0 entered "
        f"{TWELFTH.replace('allgather_base', 'allreduce')}", None,
    ),
    "of two the one that did so before is right": (
        {0: replace(REDUCES, is_new=True), 1: WAITING},
        f"rank 0 entered allreduce of layers.1 where rank 1 entered {TWELFTH}", 0,
    ),
    "both did otherwise": (
        {0: replace(REDUCES, is_new=True), 1: replace(WAITING, is_new=True)},
        "rank 1 entered allgather_base of layers.1 where rank 0 entered "
        f"{TWELFTH.replace('allgather_base', 'allreduce')}", None,
    ),
    "NCCL's hosts go on after they parted": (
        {0: replace(WAITING, recent=WHOLE), 1: replace(REDUCES, recent=PARTED),
         2: replace(WAITING, recent=WHOLE)},
        "rank 1 entered all_reduce where ranks 0, 2 entered broadcast in step 5 "
        "(collective 11 of ranks 0,1,2,3)", 1,
    ),
    "gloo took less than was sent, and ended a rank that recorded nothing": (
        {0: replace(WAITING, operator="all_reduce", sizes="[[8]]"),
         1: replace(ABSENT, recent=recent("all_reduce", first=12, sizes="[[4]]")),
         2: replace(ABSENT, recent=recent("all_reduce", first=12, sizes="[[8]]"))},
        "rank 1 entered all_reduce of sizes [[4]], not [[8]], where ranks 0, 2 entered all_reduce "
        "of layers.1 in step 7 (collective 12 of ranks 0,1,2,3)", 1,
    ),
    "gloo let two go on": (
        {0: replace(WAITING, entered={"0,1,2,3": 11}), 1: WAITING, 2: WAITING}, "", None,
    ),
    "buffers that begin elsewhere, sizes that one did not record": (
        {0: replace(ABSENT, recent=recent("all_gather", "broadcast", sizes="[[8]]")),
         1: replace(ABSENT, recent=recent("broadcast", "all_reduce", first=11))}, "", None,
    ),
    "agree": ({0: WAITING, 1: WAITING}, "", None),
    "unknown owner": ({0: WAITING, 1: replace(WAITING, label="")}, "", None),
    "came back": ({0: WAITING, 1: replace(REDUCES, is_inside=False)}, "", None),
    "another number": ({0: WAITING, 1: replace(REDUCES, entered={"0,1,2,3": 13})}, "", None),
    "another group": ({0: WAITING, 1: replace(REDUCES, group=(1, 3))}, "", None),
    "no group": ({0: REDUCES, 1: replace(WAITING, group=())}, "", None),
}  # fmt: skip


def of_pair(number: int) -> str:
    return f"(collective {number} of ranks 0,1)"


CIRCLE: dict[str, Row] = {
    "one gathers where the others capture": (
        {0: place({"0,2": 7, "0,1,2,3": 1}), 1: place({"1,3": 7, "0,1,2,3": 1}),
         2: place({"0,2": 7, "0,1,2,3": 1}),
         3: replace(place({"2,3": 9, "1,3": 8}, (1, 3)), label="root", called_at="train.py:7")},
        "rank 3 entered allgather_base of root (of ranks 1,3), called at train.py:7, where ranks "
        "0, 1, 2 entered allgather_base of layers.1 in step 7 (collective 1 of ranks 0,1,2,3)", 3,
    ),
    "one went on where the others meet, and one of these is due there": (
        {0: place({"0,2": 98}, (0, 2)), 1: place({"0,1,2,3": 1, "1,3": 97}),
         2: place({"0,1,2,3": 1, "0,2": 97}), 3: place({"0,1,2,3": 1, "1,3": 97})},
        "rank 0 entered allgather_base of layers.1 (of ranks 0,2) where ranks 1, 2, 3 entered "
        "allgather_base of layers.1 in step 7 (collective 1 of ranks 0,1,2,3)", 0,
    ),
    "a third that is in one of two groups saw no choice": (
        {0: place({"0,1": 5}, (0, 1)), 1: place({"0,1": 4, "0,1,2,3": 2}),
         2: place({"2,3": 9, "0,1,2,3": 2})},
        "rank 1 entered allgather_base of layers.1 (of ranks 0,1,2,3) where rank 0 entered "
        f"allgather_base of layers.1 in step 7 {of_pair(5)}", None,
    ),
    "behind a circle": (
        {2: place({"2,3": 3}, (2, 3)), 3: place({"2,3": 2, "0,1,3": 4, "0,3": 1}, (0, 1, 3)),
         0: place({"0,1,3": 3, "0,3": 2}, (0, 3)), 1: place({"0,1,3": 4}, (0, 1, 3))},
        "rank 3 entered allgather_base of layers.1 (of ranks 0,1,3) where rank 0 entered "
        "allgather_base of layers.1 in step 7 (collective 2 of ranks 0,3)", None,
    ),
    "one is on its way": (
        {0: place({"0,1": 5, "1,2": 0}, (0, 1)), 1: place({"0,1": 4, "1,2": 3}, (1, 2)),
         2: place({"1,2": 3}, (1, 2))}, "", None,
    ),
    "all inside": ({0: WAITING, 1: WAITING}, "", None),
}  # fmt: skip


@pytest.mark.parametrize("row", CIRCLE)
def test_who_is_in_a_circle(row: str) -> None:
    """Ranks that wait for each other in several groups: who is where fewer are, by name."""
    places, told, at_fault = CIRCLE[row]
    assert find_missing(places) is find_mismatch(places) is None
    chain = find_chain(places)
    assert ("" if chain is None else chain.words) == told
    assert (None if chain is None else chain.end) == at_fault


@pytest.mark.parametrize("row", [*MISSING, *MISMATCH])
def test_who_kept_whom_waiting(row: str) -> None:
    """By name, with the collective; where places do not single anybody out, nobody is named."""
    find = find_missing if row in MISSING else find_mismatch
    places, told, at_fault = (MISSING | MISMATCH)[row]
    fault = find(places)
    assert ("" if fault is None else fault_words(fault)) == told
    assert (None if fault is None else odd_one(fault)) == at_fault


INSIDE, FROM_0 = place({"0,1": 5}, (0, 1)), replace(ABSENT, message="recv", peer=0)
CHAINS: dict[str, tuple[dict[int, Place], tuple[int, ...], int | None]] = {
    "groups in a circle": (
        {0: INSIDE, 1: place({"0,1": 4, "1,3": 9}, (1, 3)), 3: place({"0,3": 2}, (0, 3)),
         2: WAITING}, (0, 1), None),
    "a message that never comes": ({0: INSIDE, 1: FROM_0}, (0, 1), None),
    "messages, of one that waits in nothing": (
        {0: ABSENT, 1: FROM_0, 2: replace(FROM_0, peer=1)}, (1, 2), 0),
    "of one that is gone": ({1: FROM_0}, (), None),
    "one is outside": ({0: ABSENT, 1: ABSENT}, (), None),
}  # fmt: skip


@pytest.mark.parametrize("row", CHAINS)
def test_who_waits_for_whom(row: str) -> None:
    """A circle blames nobody, a chain the one at its end."""
    places, first, end = CHAINS[row]
    chain = find_chain(places)
    if chain is None:
        assert not first
    else:
        assert tuple(sorted((*chain.fault.others, *chain.fault.ranks))) == first
        assert chain.end == end


def test_a_place_is_there_whatever_becomes_of_the_writer(tmp_path: Path) -> None:
    """The last one is read while the file is open, a shorter one whole; a damaged one is none."""
    path = place_path(tmp_path, 3)
    assert read_place(path) is None
    file, shorter = PlaceFile(path), replace(WAITING, label="", entered={})
    assert read_place(path) is None
    for written in (WAITING, shorter):
        file.write(written)
        assert read_place(path) == written
    file.write(replace(WAITING, label="x" * PLACE_BYTES))
    assert read_place(path) == shorter
    file.remove()
    assert not path.exists()
    for damage in (b"", b"{}", b"\xff", b'{"step": 1', b"[]\n"):
        path.write_bytes(damage)
        assert read_place(path) is None


@pytest.mark.parametrize("ranks", [8, 200, 1000])
def test_an_answer_is_as_long_as_the_leader_reads(ranks: int, tmp_path: Path) -> None:
    """Of groups of many ranks it names fewer collectives, the latest; its place is there."""
    key = ",".join(map(str, range(ranks)))
    called = [
        {"key": key, "number": number, "operator": "all_reduce", "step": 3} for number in range(32)
    ]
    answer = {
        "step": 3, "operator": "all_reduce", "label": "", "group": list(range(ranks)),
        "is_inside": True, "entered": {key: 31}, "recent": called,
    }  # fmt: skip
    (tmp_path / "rank0.answer").write_text(fitting(answer))
    found = read_place(tmp_path / "rank0.answer")
    assert found is not None
    numbers = [each.number for each in found.recent]
    assert numbers == list(range(32))[32 - len(numbers) :]
    assert (len(numbers) == 32) == (ranks == 8)


# --- NCCL's flight recorder -------------------------------------------------------------------


def places_in(folder: Path) -> dict[int, Place]:
    found = {rank: last_place(folder, rank) for rank in range(2)}
    return {rank: place for rank, place in found.items() if place is not None}


DONE, STARTED, LATER = (("0", GATHER, how) for how in ("completed", "started", "scheduled"))
OF_7, REDUCED = ("7", "all_reduce", "started"), ("0", "all_reduce", "completed")
CALLS = [("0", "all_reduce", "started"), ("0", "broadcast", "scheduled")]
Calls = list[tuple[str, str, str]]
DUMPS: dict[str, tuple[Calls, Calls, str]] = {
    "rank 0 enqueued more, and waits in the first of them": (
        [DONE, STARTED, LATER, LATER], [DONE],
        "rank 1 never entered all_gather_base in step 5 (collective 2 of ranks 0,1, "
        "called at train.py:2 in main)",
    ),
    "two groups of the same ranks are counted each": (
        [*[REDUCED] * 3, OF_7], [REDUCED] * 3,
        "rank 1 never entered all_reduce in step 5 (collective 1 of ranks 0,1, "
        "called at train.py:4 in main)",
    ),
    "different collectives": (
        CALLS, CALLS[::-1],
        "rank 1 entered broadcast, called at train.py:1 in main, where rank 0 entered all_reduce "
        "in step 5 (collective 1 of ranks 0,1, called at train.py:1 in main)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", DUMPS)
def test_dumps_name_the_rank_and_the_line_that_called(tmp_path: Path, row: str) -> None:
    """Numbers and lines are the recorder's, the step is the program's own note."""
    own = Place(
        step=5, operator="all_reduce", label="", group=(0, 1), is_inside=False, entered={"0,1": 9}
    )
    for rank, calls in enumerate(DUMPS[row][:2]):
        dump(tmp_path / f"nccl_rank{rank}", *calls)
        place_path(tmp_path, rank).write_text(dumps(own) + "\n")
    places = places_in(tmp_path)
    fault = find_missing(places) or find_mismatch(places)
    assert fault is not None
    assert fault_words(fault) == DUMPS[row][2]


def test_an_answer_comes_before_a_dump_and_a_dump_before_notes(tmp_path: Path) -> None:
    """The answer knows module and phase; a dump has what C++ called; notes are what is left."""
    told = Place(step=3, operator="x", label="", group=(0, 1), is_inside=True, phase="backward")
    place_path(tmp_path, 0).write_text(dumps(replace(told, operator="own")) + "\n")
    assert last_place(tmp_path, 0) == replace(told, operator="own")
    dump(tmp_path / "nccl_rank0", ("0", "all_reduce", "started"), frames=False)
    found = last_place(tmp_path, 0)
    assert found is not None
    assert (found.operator, found.called_at, found.step) == ("all_reduce", "", 3)
    answer_path(tmp_path, 0).write_text(dumps(told) + "\n")
    assert last_place(tmp_path, 0) == told


class Making:
    """What a pickle can make whoever reads it do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_dump_that_cannot_be_understood_says_nothing(tmp_path: Path) -> None:
    """It is data: no class in it is looked up, nothing in it is called, and no damage raises."""
    path, made = tmp_path / "nccl_rank0", tmp_path / "made"
    assert read_dump(path) is None
    groups = {"0": {"name": "0", "ranks": "import"}}
    plains: list[Any] = [
        [], {"pg_config": {}, "entries": []}, {"pg_config": groups, "entries": [{}]}, Path,
        {"pg_config": {}, "entries": [Making(made)]},
    ]  # fmt: skip
    for damage in (b"", b"text", *map(pickle.dumps, plains)):
        path.write_bytes(damage)
        assert read_dump(path) is None
    assert not made.exists()


# --- what is asked for ------------------------------------------------------------------------


def spec(**changes: Any) -> RunSpec:
    held: dict[str, Any] = {"config": {}, "device": "cuda", "world_size": 2, "timeout_s": 9.0}
    return RunSpec(**held | {"soak": SoakSpec(by="replays", amount=5)} | changes)


PROGRAM = spec(soak=None, config={"program": {"kind": "script", "target": "/x", "folder": "/"}})
OF_CPU = replace(PROGRAM, device="cpu")


def test_soaks_and_programs_on_gpus_leave_evidence(tmp_path: Path) -> None:
    """An error that a program catches must not cost it a core dump; what the user set stands."""
    soak, program = (evidence_environment(each, tmp_path, 3, {}) for each in (spec(), PROGRAM))
    assert soak["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(tmp_path / "nccl_rank")
    assert soak["CUDA_COREDUMP_FILE"] == str(tmp_path / "cuda3.core")
    assert program == {n: value for n, value in soak.items() if not n.startswith("CUDA_")}
    # A soak has these variables, and its reference has not: their environments are the same.
    assert variables(soak) == variables(program) == {}
    mine = {"CUDA_COREDUMP_FILE": "/mine"}
    assert soak.keys() - evidence_environment(spec(), tmp_path, 3, mine).keys() == mine.keys()
    for other in (spec(device="cpu"), spec(soak=None), OF_CPU):
        assert evidence_environment(other, tmp_path, 0, {}) == {}
    # Ranks have time to answer; alone one waits for nobody, and is not asked.
    assert evidence.dumps_take_s(OF_CPU) == evidence.ANSWER_S > evidence.dumps_take_s(PROGRAM) > 0
    assert evidence.dumps_take_s(replace(OF_CPU, world_size=1)) == 0.0
