"""Contracts of harness.bisector.questions: nothing is asked twice, nothing is believed unread."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.bisector.questions import (
    Budget,
    Identity,
    Journal,
    OutOfBudget,
    Question,
    Reply,
    read_journal,
)
from harness.errors import Infrastructure, UsageError

ENVIRONMENT = {"package torch": "2.11", "device": "cpu"}
IDENTITY = Identity(code="abc", environment=ENVIRONMENT, case="smoke.dp2")
FAILS = Reply(answer="fails", words="it failed", detail={"step": 3}, seconds=1.5)


def never() -> Reply:
    raise AssertionError("asked again")


def question(key: str, runs: int = 1) -> Question:
    return Question(key=key, words=f"does {key} fail?", runs=runs)


def asked(path: Path, *keys: str) -> Path:
    """A journal in which these questions have been asked."""
    with Journal(path, IDENTITY) as journal:
        for key in keys:
            journal.ask(question(key), lambda: FAILS)
    return path


def test_a_question_is_asked_once(tmp_path: Path) -> None:
    """The second asker gets the stored reply, in this sitting and in the next."""
    path = tmp_path / "search" / "questions.jsonl"
    with Journal(path, IDENTITY) as journal:
        assert journal.ask(question("a"), lambda: FAILS) == FAILS
        assert journal.ask(question("a"), never) == FAILS
    with Journal(path, IDENTITY) as journal:
        assert journal.ask(question("a"), never) == FAILS
        assert journal.known("b") is None
        assert journal.entries == ((question("a"), FAILS),)
    assert read_journal(path) == (IDENTITY, ((question("a"), FAILS),))


def test_time_is_taken_where_a_reply_does_not_say(tmp_path: Path) -> None:
    """The journal's own clock, once before and once after."""
    ticks = iter([10.0, 12.5])
    with Journal(tmp_path / "q", IDENTITY, clock=lambda: next(ticks)) as journal:
        assert journal.ask(question("a"), Reply).seconds == 2.5


def test_what_raises_is_asked_again(tmp_path: Path) -> None:
    """Ctrl-C in a question leaves no answer behind."""

    def interrupted() -> Reply:
        raise KeyboardInterrupt

    with Journal(tmp_path / "q", IDENTITY) as journal:
        with pytest.raises(KeyboardInterrupt):
            journal.ask(question("a"), interrupted)
        assert journal.ask(question("a"), lambda: FAILS) == FAILS


def test_an_answer_is_on_the_disk_before_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that loses its power keeps every answer that a search went on from."""
    path, synced = tmp_path / "q", list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Journal(path, IDENTITY) as journal:
        assert synced == [path.stat().st_size]
        journal.ask(question("a"), lambda: FAILS)
        assert synced[1:] == [path.stat().st_size]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is not kept, and what is kept later does not follow half of it."""
    write, room = os.write, 20

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "no space left")
        written = write(fd, data[:room])
        room -= written
        return written

    path = tmp_path / "q"
    with Journal(path, IDENTITY) as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(Infrastructure, match="no space left"):
            journal.ask(question("a"), lambda: FAILS)
        monkeypatch.undo()
        assert journal.known("a") is None
        journal.ask(question("b"), lambda: FAILS)
    assert read_journal(path) == (IDENTITY, ((question("b"), FAILS),))


def test_a_cut_last_line_is_asked_again(tmp_path: Path) -> None:
    """Wherever it was cut: whole lines before it stand, and the file is whole afterwards."""
    path = asked(tmp_path / "q", "a", "b")
    data = path.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    for end in (start + 1, len(data) - 1, 0, 5):
        path.write_bytes(data[:end])
        with Journal(path, IDENTITY) as journal:
            assert bool(journal.known("a")) == (end >= start)
            assert journal.known("b") is None
            journal.ask(question("a"), lambda: FAILS)
            journal.ask(question("b"), lambda: FAILS)
        assert path.read_bytes() == data


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_damaged_line_is_named(tmp_path: Path, number: int) -> None:
    """One bit of any whole line stops the search, the last included, with its number."""
    path = asked(tmp_path / "q", "a", "b")
    lines = path.read_bytes().split(b"\n")
    for place in range(0, len(lines[number - 1]), 7):
        damaged = bytearray(lines[number - 1])
        damaged[place] ^= 1
        path.write_bytes(b"\n".join([*lines[: number - 1], bytes(damaged), *lines[number:]]))
        with pytest.raises(Infrastructure, match=rf"q:{number}: "):
            Journal(path, IDENTITY)


def test_a_line_without_its_checksum_is_damaged(tmp_path: Path) -> None:
    """Whoever wrote it, nobody can say that it is whole."""
    path = asked(tmp_path / "q", "a")
    head, line, _ = path.read_text().split("\n")
    plain = json.loads(line)
    del plain["sha256"]
    path.write_text(f"{head}\n{json.dumps(plain)}\n")
    with pytest.raises(Infrastructure, match="q:2: damaged"):
        Journal(path, IDENTITY)


def test_a_line_that_is_lost_or_twice_is_seen(tmp_path: Path) -> None:
    """A question twice is named; a journal without its first line is none."""
    path = asked(tmp_path / "q", "a")
    head, line, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([head, line, line, b""]))
    with pytest.raises(Infrastructure, match="q:3: the question 'a' twice"):
        Journal(path, IDENTITY)
    path.write_bytes(line + b"\n")
    with pytest.raises(Infrastructure, match="q:1: expected a journal of schema 2"):
        Journal(path, IDENTITY)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"code": "def"}, "code abc became def"),
        ({"case": "smoke.dp4"}, "case smoke.dp2 became smoke.dp4"),
        (
            {"environment": ENVIRONMENT | {"package torch": "2.12"}},
            "package torch 2.11 became 2.12",
        ),
        ({"environment": {"device": "cpu"}}, "package torch 2.11 became absent"),
        (
            {"code": "def", "environment": ENVIRONMENT | {"a": "1", "b": "2", "c": "3"}},
            "code abc became def; a absent became 1; b absent became 2; 1 more",
        ),
    ],
)
def test_another_search_is_refused(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    """Answers of another code, environment or case are not this search's: what differs is said."""
    path = asked(tmp_path / "q", "a")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=rf"hold here and now, but {told}: name another folder"):
        Journal(path, Identity(**IDENTITY.to_json() | other))
    assert path.read_bytes() == before


def test_one_writer(tmp_path: Path) -> None:
    """The second is refused until the first is closed."""
    with (
        Journal(tmp_path / "q", IDENTITY),
        pytest.raises(UsageError, match="in use by another search"),
    ):
        Journal(tmp_path / "q", IDENTITY)
    Journal(tmp_path / "q", IDENTITY).close()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """What a link points to is somebody else's."""
    (tmp_path / "q").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Infrastructure, match="cannot open"):
        Journal(tmp_path / "q", IDENTITY)
    assert not (tmp_path / "elsewhere").exists()


def test_a_budget_of_runs(tmp_path: Path) -> None:
    """What costs more than is left is not asked; what is stored or free costs nothing."""
    path = asked(tmp_path / "q", "a")
    with Journal(path, IDENTITY, Budget(runs=3)) as journal:
        journal.ask(question("a", runs=9), never)
        journal.ask(question("b", runs=3), lambda: Reply(runs=2, seconds=1.0))
        with pytest.raises(OutOfBudget, match=r"budget of 3 runs: 2 spent, .* up to 2"):
            journal.ask(question("c", runs=2), never)
        journal.ask(question("c", runs=1), lambda: FAILS)
        with pytest.raises(OutOfBudget):
            journal.ask(question("d", runs=1), never)
        journal.ask(question("free", runs=0), lambda: Reply(runs=0, seconds=1.0))


def test_a_budget_of_minutes() -> None:
    """Time is over for what costs a run, and counts from the beginning of the sitting."""
    now_s = 100.0
    budget = Budget(minutes=2, clock=lambda: now_s)
    now_s = 219.0
    budget.check(1)
    now_s = 220.0
    budget.check(0)
    with pytest.raises(OutOfBudget, match="budget of 2 minutes is spent"):
        budget.check(1)


@pytest.mark.parametrize("wrong", [{"runs": -1}, {"minutes": -1.0}, {"minutes": float("nan")}])
def test_a_budget_that_cannot_be(wrong: dict[str, float]) -> None:
    """One line for the user."""
    with pytest.raises(UsageError, match="budget: expected"):
        Budget(**wrong)  # type: ignore[arg-type]
