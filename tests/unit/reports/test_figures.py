"""Losses and state of two runs: differences that a rounded plot would hide."""

import base64
import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pandas as pd
import pytest

from harness.records import RunResult
from harness.store import RunFolder
from reports.compared import (
    BEFORE,
    LOSS,
    MISSING,
    GroupMap,
    LossCurve,
    StateMap,
    loss_curve,
    state_map,
)
from reports.figures import loss_figure, state_figure
from tests.unit.reports.folders import Writer, drift, same

ONE, PLUS3, ZERO, MINUS_ZERO = 0x3F800000, 0x3F800003, 0, 0x80000000
NAN, OTHER_NAN, HUGE = 0x7FC00000, 0x7FC00001, 0x7F000000


def losses(changed: dict[tuple[int, int], int | None] | None = None) -> pd.DataFrame:
    """Two ranks, three steps of 1.0; by rank and step, others, or none."""
    plain = {(rank, step): ONE for rank in (0, 1) for step in (0, 1, 2)} | (changed or {})
    rows = [
        (*place, f"{pattern:08x}", struct.unpack(">f", pattern.to_bytes(4, "big"))[0])
        for place, pattern in plain.items() if pattern is not None
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["rank", "step", "bits", "value"])


def curve_of(left: pd.DataFrame, right: pd.DataFrame, rank: int = 0) -> LossCurve:
    curve = loss_curve(left, right, rank)
    assert curve is not None
    return curve


@pytest.mark.parametrize(
    ("left", "right", "differing", "words"),
    [
        ({}, {}, (), ["Δloss is zero: the same bits in 3 shared steps on 2 ranks."]),
        ({}, {(1, 2): PLUS3}, (2,),
         ["first at step 2 on rank 1", "at most 3 ulp (step 2, rank 1)"]),
        ({(0, 1): ZERO}, {(0, 1): MINUS_ZERO}, (1,), ["by the sign of a zero"]),
        ({(0, 1): NAN}, {(0, 1): OTHER_NAN}, (1,), ["1 is NaN or infinite"]),
        ({}, {(1, 2): None}, (), ["without a counterpart in the other run: 1."]),
    ],
    ids=["equal", "another rank", "signed zero", "two NaNs", "lost"],
)  # fmt: skip
def test_differing_losses_are_in_words(
    left: Any, right: Any, differing: tuple[int, ...], words: list[str]
) -> None:
    """A flat zero is stated with how much it covers; what no distance shows is a difference."""
    curve = curve_of(losses(left), losses(right), rank=7)
    assert (curve.rank, curve.differing) == (0, differing)
    assert all(word in curve.words for word in words)
    if right.get((1, 2)) == PLUS3:
        assert curve.delta_ulps == (0.0, 0.0, 3.0)
    assert loss_curve(losses(), losses().iloc[:0], 0) is None


def test_the_loss_picture_follows_the_scheme_and_fetches_nothing() -> None:
    """Dark and light are both inside; NaN and huge distances are drawn as plain text."""
    curve = curve_of(losses(), losses({(1, 1): NAN, (0, 2): HUGE}))
    uri = loss_figure(curve)
    assert uri == loss_figure(curve)
    text = base64.b64decode(uri.partition(",")[2]).decode()
    words = " ".join(ET.fromstring(text).itertext())
    assert "differs first at step 1" in words
    assert "NaN or infinite" in words
    assert "mathdefault" not in words
    assert "prefers-color-scheme:dark" in text
    assert not any(word in text for word in ("#01020", "<!DOCTYPE"))


Pair = tuple[RunResult, RunResult]


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Pair]:
    """Reference and candidate of two ranks, the candidate's steps edited."""

    def make(edit: Any = same, **changes: Any) -> Pair:
        writer = Writer(tmp_path / "run")
        writer.add("a", 2, "attn", candidate={"edit": edit, **changes})
        folder = RunFolder.open(writer.write())
        (case,) = folder.cases
        return folder.load_run(case.reference), folder.load_run(case.candidate)

    return make


def compared(runs: Pair) -> tuple[StateMap, dict[str, dict[tuple[int, int], int]]]:
    """The map of a candidate, and places that are not equal, by group."""
    found = state_map(*runs, "candidate")
    assert found is not None
    return found, {g.group: {p: n for p, n in g.counts.items() if n} for g in found.groups}


def test_the_map_counts_tensors_that_differ_by_step_and_rank(runs: Callable[..., Pair]) -> None:
    """Each group on its own, the state before step 0 first; equal groups are only named."""
    found, places = compared(runs(drift))
    assert (found.steps[0], found.ranks, found.equal) == (BEFORE, (0, 1), ("samples", "rng"))
    assert [group.group for group in found.groups] == [LOSS, "grads", "weights", "optim"]
    assert places["weights"] == {(step, 1): 1 for step in range(7, 20)}
    assert min(places["grads"]) == (8, 1)
    assert min(places[LOSS]) == (9, 0)
    (weights,) = (group for group in found.groups if group.group == "weights")
    assert "first at step 7 on rank 1, in 13 of 42" in weights.words


def test_what_one_run_lacks_is_missing_and_never_equal(runs: Callable[..., Pair]) -> None:
    """A run that ended early leaves every later step of every group missing; of other ranks there
    is no map."""
    left, right = runs(stop=18, what="hang", message="m", culprit=1)
    missing = {(step, rank): MISSING for step in (18, 19) for rank in (0, 1)}
    places = compared((left, right))[1]
    assert places == dict.fromkeys((LOSS, "samples", "grads", "weights", "optim", "rng"), missing)
    wide = dataclasses.replace(right, spec=dataclasses.replace(right.spec, world_size=4))
    assert state_map(left, wide, "candidate") is None


@pytest.mark.parametrize(("ranks", "steps"), [(2, 20), (8, 100), (64, 40), (3, 900)])
def test_a_map_is_drawn_with_a_title_for_every_place(ranks: int, steps: int) -> None:
    """However many steps and ranks, the first difference is in a title and the picture is small."""
    shown = StateMap(role="candidate", steps=tuple(range(BEFORE, steps)), equal=(), groups=(),
                     ranks=tuple(range(ranks)))  # fmt: skip
    counts = {(step, rank): int(step >= 7 and rank == 1) for step in shown.steps
              for rank in shown.ranks}  # fmt: skip
    group = GroupMap(group="weights", num_tensors=4, counts=counts)
    picture = ET.fromstring(state_figure(shown, group))
    assert picture.get("aria-label") == group.words
    assert float(str(picture.get("width"))) <= 44 + 120 * 9 + 1
    titles = [title.text or "" for title in picture.iter("title")]
    assert any("rank 1: 1 of 4 tensors differ" in title for title in titles)
    assert any(re_first(title) <= 7 for title in titles if "1 of 4" in title)
    assert any(title.startswith(("step init", "steps init to")) for title in titles)


def re_first(title: str) -> int:
    """The first step that a title names."""
    word = title.split()[1].rstrip(",:")
    return BEFORE if word == "init" else int(word)
