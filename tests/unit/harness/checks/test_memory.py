"""Limits on peak memory, the test of a series of memory, and what a soak states."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checks.memory import evaluate, names_in, slope_of
from harness.provenance import HOST_KEY, SHARED_HOST
from harness.records import RunResult
from harness.values import LEAST_STEPS, SoakSpec
from tests.support import run_records as lab
from tests.support.run_records import CANDIDATE, REFERENCE, ask, edit, edit_all, said

KIB, MIB = 1 << 10, 1 << 20
RATIO = {"max_ratio": 2.0}


def peaked(run: RunResult, *peaks: int) -> RunResult:
    """The run with these peaks by rank."""
    run = edit_all(run, peak_bytes=lambda step, rank: peaks[rank])
    for rank, peak in enumerate(peaks):
        run = edit(run, rank, end={"peak_bytes": peak})
    return run


@pytest.mark.parametrize(
    ("reference", "candidate", "limits", "outcome"),
    [
        (REFERENCE, CANDIDATE, {"max_ratio": 1}, "passed"),
        # One rank past its own counterpart fails, although another uses more memory.
        (peaked(REFERENCE, 10_000, 2001), peaked(CANDIDATE, 10_000, 4002), RATIO, "passed"),
        (peaked(REFERENCE, 10_000, 2001), peaked(CANDIDATE, 10_000, 4003), RATIO, "failed"),
        (peaked(REFERENCE, 2001, 10_000), peaked(CANDIDATE, 4003, 10_000), RATIO, "failed"),
        # What only one step or only the end record shows is not lost.
        (REFERENCE, edit(CANDIDATE, 0, 1, peak_bytes=9999), RATIO, "failed"),
        (REFERENCE, edit(CANDIDATE, 0, end={"peak_bytes": 9999}), RATIO, "failed"),
        (REFERENCE, CANDIDATE, {"max_bytes": 2001}, "passed"),
        (REFERENCE, CANDIDATE, {"max_bytes": 2000} | RATIO, "failed"),
        (REFERENCE, CANDIDATE, {"max_ratio": 0.5, "max_bytes": 2001}, "failed"),
        (REFERENCE, CANDIDATE, {"max_growth_bytes": 9} | RATIO, "error"),
        # What was not measured never passes.
        (peaked(REFERENCE, 2000, 0), CANDIDATE, RATIO, "error"),
        (edit(REFERENCE, 1, steps=(), end=None), CANDIDATE, RATIO, "error"),
        (REFERENCE, peaked(CANDIDATE, 2000, 0), {"max_bytes": 10**9}, "failed"),
        (REFERENCE, replace(CANDIDATE, ranks=()), RATIO, "error"),
        (REFERENCE, CANDIDATE, {}, "error"),
    ],
)  # fmt: skip
def test_peaks_against_limits(reference: Any, candidate: Any, limits: Any, outcome: str) -> None:
    """The worst rank decides, limits are inclusive, and all of them must hold."""
    answer = ask("peak_memory", reference, candidate, **limits)
    assert answer.outcome == outcome, answer.message
    if reference.ranks[0].steps[0].peak_bytes == 10_000:
        peaks = {
            "reference_peak_bytes": 2001,
            "candidate_peak_bytes": candidate.ranks[1].end.peak_bytes,
        }
        assert answer.figures == {"rank": 1, **peaks}


@pytest.mark.parametrize(
    ("live", "growth"),
    [
        ([100 + 10 * step for step in range(16)], 80),  # a leak of 10 a step
        ([10, 20, 50, 90] + [90] * 12, 0),  # warm-up and capture
        ([50] * 5 + [90] + [50] * 8 + [90, 50], 0),  # single steps that hold more
        ([50] * 8 + [57] * 8, 7), ([50] * 8 + [40] * 8, 0),
    ],
)  # fmt: skip
def test_growth_is_what_stays(live: list[int], growth: int) -> None:
    """What is kept from the second quarter of the run to the last counts, on the worst rank."""
    reference, _, candidate = lab.Lab(steps=16).legs()
    candidate = edit_all(candidate, live_bytes=lambda step, rank: live[step] if rank else 30)
    for limit in (max(growth, 1), *((growth - 1,) if growth > 1 else ())):
        answer = ask("peak_memory", reference, candidate, max_growth_bytes=limit)
        assert (answer.outcome == "passed") == (growth <= limit)
        assert answer.figures == {"growth_rank": int(growth > 0), "growth_bytes": growth}


# --- formulas ---------------------------------------------------------------------------------

KEPT = {"parameters": 700, "gradients": 200, "optimizer": 400, "largest_unit": 50}


def noted(run: RunResult, kept: Any) -> RunResult:
    """The run, each of whose ranks says so at its end."""
    return lab.told(lab.told(run, 0, ("memory", {"at_rest": kept})), 1,
                    ("memory", {"at_rest": kept}))  # fmt: skip


@pytest.mark.parametrize(
    ("formula", "limit"),
    [("parameters + gradients + 2 * optimizer", 1700), ("2 * KiB - microbatches", 2046),
     ("max(reference, 10 * largest_unit) + world_size", 1902), ("hidden * seq / layers", 400)],
)  # fmt: skip
def test_a_formula_is_a_limit(formula: str, limit: int) -> None:
    """To the byte, with what the same rank of the reference keeps, whatever the candidate says."""
    model = {"hidden": 40, "seq": 20, "layers": 2}
    reference = peaked(noted(lab.configured(REFERENCE, model=model), KEPT), 1900, 1900)
    candidate = noted(CANDIDATE, dict.fromkeys(KEPT, 10**9))
    for peak in (limit, limit + 1):
        answer = ask("peak_memory", reference, peaked(candidate, 1, peak), max_bytes=formula)
        assert (answer.outcome == "passed") == (peak == limit)
        assert f"limit {limit}" in answer.message


@pytest.mark.parametrize(
    ("formula", "kept"),
    [("parameters", None), ("parameters", {"parameters": 1}), ("parameters / 0", KEPT),
     ("parameters - GiB", KEPT), ("weights", KEPT), ("parameters", KEPT | {"optimizer": True})],
)  # fmt: skip
def test_a_formula_without_a_value_gives_no_verdict(formula: str, kept: Any) -> None:
    """The reference did not say what it keeps, or the formula comes to nothing."""
    answer = ask("peak_memory", noted(REFERENCE, kept), CANDIDATE, max_bytes=formula)
    assert said(answer) == ("error", "not_run")


@pytest.mark.parametrize(
    ("text", "value", "names"),
    [("2 * a + b / 4", 9.0, "ab"), ("-(a - 5) * 2", 4.0, "a"), (" 1e3 ", 1000.0, ""),
     ("1.5 * MiB + KiB", 1.5 * 2**20 + 1024, ""), ("max(a, b, 1) - min(a, b)", 9.0, "ab"),
     ("1 / (b - a)", 1 / 9, "ab"), ("1 / (2 - min(a, 2))", None, "a"), ("a - GiB", None, "a")],
)  # fmt: skip
def test_arithmetic(text: str, value: float | None, names: str) -> None:
    """Formulas come to what they say; one that fails for some sizes may do for others."""
    assert names_in(text) == set(names)
    if value is None:
        with pytest.raises(ValueError, match="Expected a number > 0"):
            evaluate(text, {"a": 3.0})
    else:
        assert evaluate(text, {"a": 3.0, "b": 12.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["0", "-5", "1e999", "a - a", "a / (b - b)", "-a", "1e308 * 10 * a", "1 / 0", "9" * 400,
     "", "1 +", "a.b", "a[0]", "__import__('os')", "f(1)", "max(1)", "max(*a)", "max(1, key=2)",
     "'x' * 3", "True", "2 ** 9 ** 9", "a if a else b", "[1]", "1; 2", "(" * 600],
)  # fmt: skip
def test_what_is_no_formula_is_refused(text: str) -> None:
    """Anything but arithmetic, and what is a number > 0 for no values of its names."""
    with pytest.raises(ValueError, match="Expected"):
        names_in(text)
    with pytest.raises(ValueError, match="Expected"):
        evaluate(text, {"a": 1.0, "b": 1.0})


# --- what a soak states -----------------------------------------------------------------------

STEPS = 96
REPLAYS = (STEPS - 2) * 2 * 2 * 2
"""Of a layer each of two microbatches, forward and backward."""
LAB = lab.Lab(steps=64)
OURS, AGAIN, _ = LAB.legs()
CHECKS: dict[str, Any] = {"loss": {}, "state": {}, "soak": {}}


def soaked(**about: Any) -> RunResult:
    """A candidate of 64 steps that was soaked for 96; its reference was not."""
    spec = replace(LAB.case().candidate, soak=SoakSpec(by="replays", amount=700, **about))
    run = edit(replace(lab.Lab(steps=STEPS).legs()[2], spec=spec), key=spec.key)
    for rank in (0, 1):
        run = lab.told(run, rank, ("soaked", {"trained_s": 12.0}))
    return run


SOAKED = soaked()


def series(rank: int, name: str, a_step: int, run: RunResult = SOAKED) -> RunResult:
    """The soak with a kind of memory that grows on one rank."""
    return edit_all(run, **{
        name: lambda step, at: (1 << 30) + a_step * step if at == rank else 1 << 30
    })  # fmt: skip


def test_a_soak_states_its_bound() -> None:
    """The verdict says how many replays, the rate, what was compared, and that memory stayed."""
    verdict = lab.verdict_of(OURS, AGAIN, SOAKED, checks=CHECKS)
    assert verdict.outcome == "passed", verdict.message
    assert (
        f"no failure in {REPLAYS} replays: fewer than 0.004 a replay at 95 % (rule of three); "
        "96 steps, bits compared in 64; memory does not grow" in verdict.message
    )
    figures = lab.answers(verdict)["soak"].figures
    assert (figures["trials"], figures["rate_bound"]) == (REPLAYS, 3 / REPLAYS)
    # Ranks of other stages replay more graphs: each of theirs is no trial of its own.
    more = edit(SOAKED, 1, end={"replays": 900})
    assert ask("soak", OURS, more).figures["trials"] == REPLAYS


@pytest.mark.parametrize(
    ("run", "limits", "told"),
    [
        (series(1, "live_bytes", 64 * KIB), {}, "live memory of rank 1 grows by 65,536 bytes"),
        (series(1, "live_bytes", 64 * KIB), {"max_leak_bytes": 70_000}, ""),
        (series(0, "device_bytes", 4 * MIB), {}, "device-used memory of rank 0 grows"),
        (series(0, "device_bytes", 100), {}, ""), (series(1, "host_bytes", 64 * KIB), {}, ""),
        (series(1, "host_bytes", MIB), {}, "host memory of rank 1 grows by 1,048,576 bytes a step"),
        (series(0, "live_bytes", MIB, series(0, "host_bytes", 2 * MIB)), {},
         "live memory of rank 0"),
    ],
)  # fmt: skip
def test_a_leak_is_named(run: RunResult, limits: Any, told: str) -> None:
    """Its kind, rank and rate; a limit above it, or what allocators keep, lets it pass."""
    answer = ask("soak", OURS, run, **limits)
    assert said(answer) == (("failed", "memory_regression") if told else ("passed", ""))
    assert answer.message.startswith(told)
    assert not told or answer.figures["leak_rank"] == int(told.partition("rank ")[2][0])


def test_the_drivers_count_of_a_shared_gpu_is_no_ranks_own() -> None:
    """Memory that another rank's process took is in it: alone on its GPU it would be a leak."""
    run = series(0, "device_bytes", 4 * MIB)
    assert ask("soak", OURS, run).outcome == "failed"
    shared = {"fingerprint": {"environment": {HOST_KEY: SHARED_HOST}}}
    for rank in (0, 1):
        run = edit(run, rank, start={"environment": shared})
    assert ask("soak", OURS, run).outcome == "passed"


def test_a_bound_needs_every_other_answer() -> None:
    """Late values that are not finite, bits that differ, a check without an answer."""
    bad = edit(SOAKED, 1, STEPS - 2, nonfinite={"grads": ("head.weight",)})
    assert said(ask("soak", OURS, bad)) == ("failed", "nonfinite")
    cases: list[Any] = [(lab.flip(SOAKED, 1, 5, "grads"), {}), (SOAKED, {"peak_memory": {}})]
    for run, more in cases:
        verdict = lab.verdict_of(OURS, AGAIN, run, checks=CHECKS | more)
        assert "no failure" not in verdict.message
        assert said(lab.answers(verdict)["soak"]) == ("skipped", "not_run")
    for run in (CANDIDATE, edit(SOAKED, 0, end=None),
                edit(SOAKED, 1, steps=SOAKED.ranks[1].steps[: LEAST_STEPS - 1])):  # fmt: skip
        assert said(ask("soak", OURS, run)) == ("error", "not_run")


@pytest.mark.parametrize(
    ("turns", "outcome"), [(("poison", "jitter"), "passed"), (("jitter",), "error"), ((), "error")]
)
def test_a_stressor_without_a_turn_is_no_pass(turns: tuple[str, ...], outcome: str) -> None:
    """One that was to be at work and never was, on one rank: no verdict, and nobody's failure."""
    run = lab.configured(soaked(turn_steps=48), stress=["jitter", "poison", "races"])
    for rank, names in ((0, ("jitter", "poison")), (1, turns)):
        run = lab.told(run, rank, *(("turn", {"stress": [name, "races"]}) for name in names))
    sides = [lab.configured(each, stress=[]) for each in (OURS, AGAIN)]
    verdict = lab.verdict_of(*sides, run, checks=CHECKS)
    assert verdict.outcome == outcome, verdict.message
    assert outcome == "passed" or "poison never had a turn on rank 1" in verdict.message


# --- does a series grow? ----------------------------------------------------------------------

LENGTHS = st.integers(LEAST_STEPS, 600)


@given(steps=LENGTHS, level=st.integers(0, 1 << 36), swing=st.integers(0, 500 * KIB))
def test_a_leak_of_64_kib_a_step_is_found(steps: int, level: int, swing: int) -> None:
    """In every run that is long enough, under noise of some steps' leak; steady, to the byte."""
    leak = [level + 64 * KIB * n for n in range(steps)]
    # Multiples of the golden ratio look like noise.
    slope = slope_of([each + swing * ((n * 0.6180339887) % 1) for n, each in enumerate(leak)])
    assert slope.grows()
    assert slope.bytes_per_step == pytest.approx(64 * KIB, rel=0.5)
    assert not slope.grows(limit=128 * KIB)
    assert slope_of(leak).bytes_per_step == 64 * KIB


@given(
    steps=LENGTHS, period=st.floats(0.001, 0.5), phase=st.floats(0, 1),
    places=st.lists(st.floats(0, 1), max_size=6), part=st.floats(0.001, 0.25),
)  # fmt: skip
def test_what_is_given_back_stays_or_fills_up_is_no_leak(
    steps: int, period: float, phase: float, places: list[float], part: float
) -> None:
    """A sawtooth of up to half of the run, some allocations that stay, a warm-up that slows."""
    # Seen once a step, a shorter one looks like one that is longer than the run.
    length = max(period * steps, 2.0)
    assert not slope_of([MIB * ((n / length + phase) % 1) for n in range(steps)]).grows()
    stairs = [MIB * sum(n >= p * steps for p in places) for n in range(steps)]
    assert not slope_of(stairs).grows()
    filling = [MIB * (1 - math.exp(-n / (part * steps))) for n in range(steps)]
    assert not slope_of(filling).grows()


@pytest.mark.parametrize("places", [range(24, 64, 10), range(20, 64, 10), (27, 34, 35, 39, 50, 58)])
def test_allocations_that_stay_are_no_leak_under_noise(places: Sequence[int]) -> None:
    """Between them noise rises as often as it falls: only the jumps look like a trend."""
    stairs = [MIB * sum(n >= p for p in places) for n in range(64)]
    for noise in (KIB, 16 * KIB):
        swing = [noise * ((n * 0.6180339887) % 1) for n in range(64)]
        assert not slope_of([a + b for a, b in zip(stairs, swing, strict=True)]).grows()
