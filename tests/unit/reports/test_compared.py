"""Losses and state of two runs: differences that a rounded plot would hide."""

import base64
import dataclasses
import struct
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
)  # fmt: skip
from reports.figures import loss_figure, state_figure
from tests.unit.reports.folders import drift, same

COLUMNS = ["run", "rank", "step", "bits", "value"]


def frame(**runs: dict[tuple[int, int], int]) -> pd.DataFrame:
    """Losses by run, then by (rank, step), as bit patterns."""
    rows: list[Any] = []
    for run, losses in runs.items():
        for (rank, step), pattern in losses.items():
            value = struct.unpack(">f", pattern.to_bytes(4, "big"))[0]
            rows.append((run, rank, step, f"{pattern:08x}", value))
    return pd.DataFrame(rows, columns=COLUMNS)


def curve_of(table: pd.DataFrame, reference: str, candidate: str, rank: int) -> LossCurve | None:
    """The curve of two runs of one table."""
    left, right = (table[table["run"] == run] for run in (reference, candidate))
    return loss_curve(left, right, rank)


def losses(**changed: int) -> dict[tuple[int, int], int]:
    """Two ranks, three steps of 1.0; `r1s2=...` replaces one."""
    plain = {(rank, step): 0x3F800000 for rank in (0, 1) for step in (0, 1, 2)}
    for name, pattern in changed.items():
        plain[int(name[1]), int(name[3])] = pattern
    return plain


def test_equal_bits_are_said_in_words() -> None:
    """A flat zero is stated, with how much it covers."""
    curve = curve_of(frame(a=losses(), b=losses()), "a", "b", 0)
    assert curve is not None
    assert curve.words == "Δloss is zero: the same bits in 3 shared steps on 2 ranks."
    assert (curve.delta_ulps, curve.differing) == ((), ())


def test_one_ulp_on_another_rank_is_drawn() -> None:
    """The distance is over all ranks, whichever rank's loss is drawn."""
    curve = curve_of(frame(a=losses(), b=losses(r1s2=0x3F800003)), "a", "b", 0)
    assert curve is not None
    assert curve.rank == 0
    assert curve.delta_ulps == (0.0, 0.0, 3.0)
    assert curve.differing == (2,)
    assert "first at step 2 on rank 1" in curve.words
    assert "at most 3 ulp (step 2, rank 1)" in curve.words


def test_signed_zero_and_nan_differ_without_a_distance() -> None:
    """-0.0 for 0.0 and one NaN for another are differences although no distance shows them."""
    curve = curve_of(frame(a=losses(r0s1=0), b=losses(r0s1=0x80000000)), "a", "b", 0)
    assert curve is not None
    assert curve.differing == (1,)
    assert "by the sign of a zero" in curve.words
    nans = frame(a=losses(r0s1=0x7FC00000), b=losses(r0s1=0x7FC00001))
    curve = curve_of(nans, "a", "b", 0)
    assert curve is not None
    assert curve.differing == (1,)
    assert "1 is NaN or infinite" in curve.words


def test_lost_losses_are_counted() -> None:
    """Losses without a counterpart are said, never taken for equal; a lost rank is replaced."""
    short = {key: value for key, value in losses().items() if key != (1, 2)}
    curve = curve_of(frame(a=losses(), b=short), "a", "b", 7)
    assert curve is not None
    assert curve.rank == 0
    assert "1 recorded loss has no counterpart" in curve.words
    assert curve_of(frame(a=losses()), "a", "b", 0) is None


@pytest.fixture
def runs(writer: Any) -> Any:
    """Reference and candidate of two ranks, the candidate's steps edited."""

    def make(edit: Any = same, ranks: int = 2, **changes: Any) -> tuple[RunResult, RunResult]:
        writer.add("a", ranks, "attn", candidate={"edit": edit, **changes})
        folder = RunFolder.open(writer.write())
        (case,) = folder.cases
        return folder.load_run(case.reference), folder.load_run(case.candidate)

    return make


def compared(runs: tuple[RunResult, RunResult]) -> StateMap | None:
    """The map of a candidate."""
    return state_map(runs[0], runs[1], "candidate")


def groups(found: StateMap | None) -> dict[str, dict[tuple[int, int], int]]:
    """Places that are not equal, by group."""
    assert found is not None
    return {g.group: {p: n for p, n in g.counts.items() if n} for g in found.groups}


def test_the_map_counts_tensors_that_differ_by_step_and_rank(runs: Any) -> None:
    """Each group on its own, the state before step 0 first; equal groups are only named."""
    found = compared(runs(drift))
    assert found is not None
    assert (found.steps[0], found.ranks, found.equal) == (BEFORE, (0, 1), ("samples", "rng"))
    places = groups(found)
    assert places["weights"] == {(step, 1): 1 for step in range(7, 20)}
    assert min(places["grads"]) == (8, 1)
    assert min(places[LOSS]) == (9, 0)
    (weights,) = (group for group in found.groups if group.group == "weights")
    assert weights.by_rank() == [([1], 7, 13, 1, 0)]
    assert "first at step 7 on rank 1, in 13 of 42" in weights.words


def test_what_one_run_lacks_is_missing_and_never_equal(runs: Any) -> None:
    """A run that ended early leaves every later step of every group missing."""
    found = compared(runs(stop=18, what="hang", message="m", culprit=1))
    missing = {(step, rank): MISSING for step in (18, 19) for rank in (0, 1)}
    assert set(groups(found)) == {"samples", LOSS, "grads", "weights", "optim", "rng"}
    assert all(places == missing for places in groups(found).values())


def test_runs_of_other_ranks_have_no_map(runs: Any) -> None:
    """Two layouts hold other tensors."""
    left, right = runs()
    wide = dataclasses.replace(right, spec=dataclasses.replace(right.spec, world_size=4))
    assert state_map(left, wide, "candidate") is None
    assert groups(state_map(left, right, "candidate")) == {}


@pytest.mark.parametrize(("ranks", "steps"), [(2, 20), (8, 100), (64, 40), (3, 900)])
def test_a_map_is_drawn_with_a_title_for_every_place(runs: Any, ranks: int, steps: int) -> None:
    """However many steps and ranks, the first difference is in a title and the picture is small."""
    found = compared(runs())
    assert found is not None
    shown = dataclasses.replace(found, steps=tuple(range(steps)), ranks=tuple(range(ranks)))
    counts = {(step, rank): int(step >= 7 and rank == 1) for step in shown.steps
              for rank in shown.ranks}  # fmt: skip
    group = GroupMap(group="weights", num_tensors=4, counts=counts)
    picture = ET.fromstring(state_figure(shown, group))
    assert picture.get("aria-label") == group.words
    assert float(str(picture.get("width"))) <= 44 + 120 * 9 + 1
    titles = [title.text or "" for title in picture.iter("title")]
    assert any("rank 1: 1 of 4 tensors differ" in title for title in titles) == (ranks <= 64)
    assert any(title.startswith(("step 7", "steps 7 to", "steps 0 to")) for title in titles)


def test_the_loss_picture_follows_the_scheme_and_fetches_nothing() -> None:
    """Dark and light are both inside; NaN and huge distances are drawn as plain text."""
    curve = curve_of(frame(a=losses(), b=losses(r1s1=0x7FC00000, r0s2=0x7F000000)), "a", "b", 0)
    assert curve is not None
    uri = loss_figure(curve)
    assert uri == loss_figure(curve)
    text = base64.b64decode(uri.partition(",")[2]).decode()
    words = " ".join(ET.fromstring(text).itertext())
    assert "differs first at step 1" in words
    assert "NaN or infinite" in words
    assert "mathdefault" not in words
    assert "prefers-color-scheme:dark" in text
    assert not any(word in text for word in ("#01020", "<!DOCTYPE"))
