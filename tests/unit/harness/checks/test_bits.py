"""What differs between two runs is found where it is: losses, state, NaN, samples read."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsdp_core.config import ParallelConfig
from fsdp_core.layouts import Dense, dense_coordinates
from harness.checks import judge, within
from harness.checks.exact import same_data
from harness.records import (
    ABSENT,
    COPIES,
    DIGEST_GROUPS,
    SAMPLES,
    CaseSpec,
    FloatBits,
    RecordError,
    RunResult,
    Verdict,
)
from harness.repeats import NUM_SAMPLES, samples_of
from harness.tolerance import Close
from tests.unit.harness.checks import conftest as lab
from tests.unit.harness.checks.conftest import (
    CANDIDATE,
    CONTROL,
    INF,
    LAB,
    NAN,
    REFERENCE,
    TENSORS,
    ask,
    configured,
    edit,
    edit_all,
    f32,
    flip,
    place,
    said,
)

WIDE = lab.Lab(world_size=16)
WIDE_REFERENCE, _, WIDE_CANDIDATE = WIDE.legs()
BOTH = (REFERENCE, CANDIDATE)
TWO = f32(2.0)
DIVERGED = ("failed", "diverged")

# --- the state --------------------------------------------------------------------------------


def test_equal_digests_pass() -> None:
    """And the answer says how many were compared, the state before step 0 included."""
    answer = ask("state", *BOTH)
    assert said(answer) == ("passed", "")
    assert answer.figures == {"digests": (5 + 9 * 4) * 2, "differing_pairs": 0}


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
@pytest.mark.parametrize(
    ("step", "group", "bit"),
    [(-1, "weights", 130), (-1, "rng", 0), *((0, g, 127) for g in TENSORS), (3, "optim", 255)],
)
def test_any_flipped_bit_is_found_where_it_is(rank: int, step: int, group: str, bit: int) -> None:
    """Of any digest, step and rank of 16, with group and tensor; no other place is named."""
    answer = ask("state", WIDE_REFERENCE, flip(WIDE_CANDIDATE, rank, step, group, bit))
    assert said(answer) == DIVERGED
    assert place(answer) == (step, rank, group, TENSORS[group][bit // 128])
    figures = ("differing_tensors", "differing_ranks", "differing_pairs", "pairs")
    assert [answer.figures[name] for name in figures] == [1, 1, 1, 16 * 5]
    assert ("before step 0" in answer.message) == (step < 0)


@pytest.mark.parametrize(
    ("flips", "first"),
    [
        ([(0, 3, "grads", 0), (0, 2, "weights", 0), (0, 2, "grads", 200), (1, 2, "grads", 5)],
         (2, 1, "grads", "embed.weight")),
        ([(0, 0, "weights", 0), (1, -1, "rng", 0)], (-1, 1, "rng", "cpu")),
        ([(1, 1, "optim", 0), (0, 1, "rng", 0)], (1, 1, "optim", "embed.weight.exp_avg")),
        ([(0, 1, "grads", 0), (1, 1, "samples", 128)], (1, 1, "samples", "targets")),
    ],
)  # fmt: skip
def test_order_is_step_group_tensor_rank(flips: list[Any], first: Any) -> None:
    """The first difference is by step, then group, then tensor, and only then by rank."""
    run = CANDIDATE
    for each in flips:
        run = flip(run, *each)
    assert place(ask("state", REFERENCE, run)) == first


def test_a_group_comes_before_all_later_ones_on_any_rank() -> None:
    """A gradient that rank 0 does not hold is named before a weight of rank 0."""
    runs = []
    for run in BOTH:
        names = (*TENSORS["grads"], "tail.weight")
        run = edit(run, 1, start={"tensors": {"grads": names}})
        for step, record in enumerate(run.ranks[1].steps):
            run = edit(run, 1, step, digests={"grads": record.digests["grads"] + "1" * 32})
        runs.append(run)
    other = flip(flip(runs[1], 1, 2, "grads", 2 * 128), 0, 2, "weights")
    assert place(ask("state", runs[0], other))[1:] == (1, "grads", "tail.weight")


@pytest.mark.parametrize("names", [TENSORS["weights"][::-1], (*TENSORS["weights"], "extra"), ()])
@pytest.mark.parametrize("rank", [1, 15])
def test_other_tensor_names_fail(names: tuple[str, ...], rank: int) -> None:
    """Equal digests of differently named, ordered or counted tensors do not pass, either way."""
    broken = edit(WIDE_CANDIDATE, rank, start={"tensors": {"weights": names}})
    for pair in ((WIDE_REFERENCE, broken), (broken, WIDE_REFERENCE)):
        answer = ask("state", *pair)
        assert (said(answer), place(answer)[:3]) == (DIVERGED, (0, rank, "tensors.weights"))


def test_exchanged_and_repeated_records_are_seen() -> None:
    """Ranks whose digests are exchanged differ on both; a second record of a step hides nothing."""
    left, right = (CANDIDATE.ranks[rank].steps[1].digests for rank in (0, 1))
    run = edit(edit(CANDIDATE, 0, 1, digests=right), 1, 1, digests=left)
    assert ask("state", REFERENCE, run).figures["differing_ranks"] == 2
    steps = CANDIDATE.ranks[0].steps
    wrong = flip(CANDIDATE, 0, 1, "optim").ranks[0].steps[1]
    run = edit(CANDIDATE, 0, steps=(steps[0], wrong, *steps[1:]))
    assert place(ask("state", REFERENCE, run))[:2] == (1, 0)


@pytest.mark.parametrize(
    "change", [lambda d: d | {"grads": d["grads"][:-3]}, lambda d: d | {"grads": d["grads"] + "ab"},
               lambda d: {"grads": d["grads"]}, lambda d: {}, lambda d: d | {"novel": "00" * 16}],
)  # fmt: skip
def test_malformed_digests_differ(change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    """Odd lengths, lost and new groups never pass and never raise."""
    steps = list(CANDIDATE.ranks[0].steps)
    steps[1] = replace(steps[1], digests=change(steps[1].digests))
    answer = ask("state", REFERENCE, edit(CANDIDATE, 0, steps=tuple(steps)))
    assert (answer.outcome, place(answer)[:2]) == ("failed", (1, 0))


def test_nothing_to_compare_is_no_pass() -> None:
    """No steps, names or losses, digests of absent tensors alone, a state before step 0 of one."""
    empty = edit(edit(CANDIDATE, 0, steps=()), 1, steps=())
    nameless = edit(edit(REFERENCE, 0, start=None), 1, start=None)
    absent = {group: ABSENT * len(names) for group, names in TENSORS.items()}
    for pair in ((REFERENCE, empty), (nameless, CANDIDATE),
                 [edit_all(run, digests=absent) for run in BOTH]):  # fmt: skip
        assert said(ask("state", *pair)) == ("error", "not_run")
    lost = edit(CANDIDATE, 1, initial=None)
    for pair in ((REFERENCE, lost), (lost, REFERENCE)):
        assert said(ask("state", *pair)) == ("error", "corrupt_record")
    assert said(ask("finite", REFERENCE, empty)) == ("error", "not_run")
    bare = [edit_all(run, loss=None, microbatch_losses=(), grad_norm=None) for run in BOTH]
    for expect in ("bitwise", {"atol": 1.0}, {"loss_gap": 1.0, "over": 2}):
        assert ask("loss", *bare, LAB.case(expect=expect)).outcome == "error"
        assert ask("loss", REFERENCE, empty, LAB.case(expect=expect)).outcome != "passed"


@pytest.mark.parametrize(("other", "outcome"), [("optim", "failed"), ("grads", "passed")])
def test_copies_are_compared_where_strategies_keep_the_same(other: str, outcome: str) -> None:
    """A stale copy fails though all else is equal; another strategy keeps other copies, or none."""
    runs: list[RunResult] = []
    for run, strategy, copy in zip(BOTH, ("optim", other), "ab", strict=True):
        run = configured(run, fsdp={"strategy": strategy})
        for rank in (0, 1):
            run = edit(run, rank, start={"tensors": {COPIES: ("embed.weight",)}})
            run = edit(run, rank, 3, digests={COPIES: copy * 32})
        runs.append(run)
    answer = ask("state", *runs)
    assert answer.outcome == outcome
    assert outcome == "passed" or place(answer)[:3] == (3, 0, COPIES)


def test_what_the_loss_would_have_shown_is_said() -> None:
    """Nothing; its bits at once; its five decimals once the difference has grown."""
    broken = flip(CANDIDATE, 1, 0, "weights")
    never = "bits of the loss never differ, its 5 decimals never differ"
    assert never in ask("state", REFERENCE, broken).message
    ours = edit(edit(REFERENCE, 0, 1, loss=TWO), 0, 3, loss=TWO)
    theirs = edit(edit(broken, 0, 1, loss=f32(2.00000024)), 0, 3, loss=f32(2.5))
    shown = "the bits of the loss differ first at step 1, its 5 decimals differ first at step 3"
    assert shown in ask("state", ours, theirs).message


# --- NaN and infinity -------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize(
    ("change", "quantity", "tensor"),
    [
        *(({"loss": bad}, "loss", "") for bad in (NAN, INF)),
        ({"microbatch_losses": (f32(1.0), NAN)}, "microbatch_losses[1]", ""),
        ({"grad_norm": INF}, "grad_norm", ""),
        *(({"nonfinite": {group: ("x",)}}, group, "x") for group in (*DIGEST_GROUPS, "buffers")),
        # The norm is made of the gradients, and what the optimizer wrote comes after both.
        ({"grad_norm": NAN, "nonfinite": {"weights": ("w",), "grads": ("x",)}}, "grads", "x"),
        ({"grad_norm": NAN, "nonfinite": {"optim": ("w",)}}, "grad_norm", ""),
    ],
)
def test_whatever_is_not_finite_fails(rank: int, change: Any, quantity: str, tensor: str) -> None:
    """Any float and any tensor of any group of any rank, named where it was computed first."""
    assert ask("finite", WIDE_REFERENCE, WIDE_CANDIDATE).figures == {"pairs": 64}
    run = edit(edit(WIDE_CANDIDATE, rank, 2, **change), 3, 3, loss=NAN)
    answer = ask("finite", WIDE_REFERENCE, run)
    assert said(answer) == ("failed", "nonfinite")
    assert place(answer) == (2, rank, quantity, tensor)
    assert answer.figures["nonfinite_pairs"] == 2
    assert "poison" not in answer.message
    assert "poison" in ask("finite", WIDE_REFERENCE, configured(run, stress=["poison"])).message


@pytest.mark.parametrize(
    ("group", "skipped", "in_reference", "outcome"),
    [
        ("buffers", False, True, "passed"), ("buffers", False, False, "failed"),
        ("weights", False, True, "failed"), ("grads", True, False, "passed"),
        ("grads", False, True, "failed"), ("weights", True, True, "failed"),
        ("loss", True, True, "failed"), ("grad_norm", True, True, "passed"),
    ],
)  # fmt: skip
def test_what_excuses_a_value_that_is_not_finite(
    group: str, skipped: bool, in_reference: bool, outcome: str
) -> None:
    """A mask that both runs have, and gradients of a skipped step; nothing that is trained."""
    is_float = group in ("loss", "grad_norm")
    bad: dict[str, Any] = {group: NAN} if is_float else {"nonfinite": {group: ("mean",)}}
    about = bad | {"skipped": "scaler" if skipped else ""}
    reference = edit(REFERENCE, 0, 1, **about) if in_reference else REFERENCE
    assert ask("finite", reference, edit(CANDIDATE, 0, 1, **about)).outcome == outcome


# --- what data-parallel ranks read ------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {"dp_outer": 2, "dp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2},
    {"tp": 2}, {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]  # fmt: skip
TEXT = {"data": {"kind": "text", "path": "short.txt"}}
Choice = Callable[[Dense, int], object]


def read(run: RunResult, choice: Choice, **config: Any) -> RunResult:
    """The run with a digest of tokens that follows from the rank's place and the step."""
    layout = ParallelConfig(**config["parallel"])

    def digests(step: int, rank: int) -> dict[str, str]:
        text = str(choice(dense_coordinates(layout, rank), step))
        return {SAMPLES: 2 * hashlib.md5(text.encode()).hexdigest()}

    return configured(edit_all(run, digests=digests), **config)


def alike(_: Dense, step: int) -> object:
    """A sampler that knows no ranks."""
    return step


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("axis", ["", "dp_outer", "dp", "cp"])
def test_each_part_of_the_batch_is_read_by_its_own_ranks(parallel: Any, axis: str) -> None:
    """Peers of tp, pp, ep and etp read alike; an axis along which all do otherwise is found."""
    layout = ParallelConfig(**parallel)

    def choice(here: Dense, step: int) -> object:
        here = here._replace(**{axis: 0}) if axis else here
        return step, here.dp_outer, here.dp, here.cp

    model = {"experts": 4, "top_k": 2, "expert_ffn": 8} if "ep" in parallel else {}
    run = lab.Lab(world_size=layout.world_size).legs()[0]
    found = same_data(read(run, choice, parallel=parallel, model=model), "reference")
    if parallel.get(axis, 1) == 1:
        assert found is None
        return
    assert found is not None
    ranks = range(layout.world_size)
    first = next(r for r in ranks if getattr(dense_coordinates(layout, r), axis))
    assert (said(found), place(found)[1:]) == (("failed", "same_data"), (first, SAMPLES, "tokens"))


@pytest.mark.parametrize(
    ("steps", "choice", "config", "is_found"),
    [
        (4, alike, {}, True), (4, lambda here, n: (n, here.dp if n == 2 else 0), {}, False),
        (1, alike, {"microbatches": 2}, False), (4, alike, {"model": {"vocab_size": 1}}, False),
        (8, alike, {"model": {"vocab_size": 2}}, False), (5, alike, TEXT, False),
        (8, lambda here, step: 0, TEXT, False), (6, alike, TEXT, True),
        (4, alike, {"program": {"target": "train.py"}}, False),
    ],
)  # fmt: skip
def test_what_is_equal_by_chance_is_no_failure(
    steps: int, choice: Choice, config: dict[str, Any], is_found: bool
) -> None:
    """One step of other samples, too few to tell, one token or two in all, a corpus of unknown
    length or of one sequence, another program; but many steps of a corpus, no two alike, are."""
    run = read(lab.Lab(steps=steps).legs()[0], choice, parallel={"dp": 2}, **config)
    assert (same_data(run, "reference") is not None) == is_found


# --- losses and norms by bits -----------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 8, 15])
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("quantity", ["loss", "grad_norm", 0, 1])
@pytest.mark.parametrize("bit", [0, 31])
def test_any_flipped_bit_of_a_loss_is_found(rank: int, step: int, quantity: Any, bit: int) -> None:
    """Of any loss or norm: exactly that step, rank and quantity."""
    record = WIDE_CANDIDATE.ranks[rank].steps[step]
    losses = list(record.microbatch_losses)
    held = losses[quantity] if isinstance(quantity, int) else getattr(record, quantity)
    changed = FloatBits.from_bits(int(held.bits, 16) ^ (1 << bit))
    change: dict[str, Any] = {str(quantity): changed}
    if isinstance(quantity, int):
        losses[quantity] = changed
        quantity, change = f"microbatch_losses[{quantity}]", {"microbatch_losses": tuple(losses)}
    assert ask("loss", WIDE_REFERENCE, WIDE_CANDIDATE).figures["pairs"] == 64
    answer = ask("loss", WIDE_REFERENCE, edit(WIDE_CANDIDATE, rank, step, **change))
    assert (said(answer), place(answer)) == (DIVERGED, (step, rank, quantity, ""))
    assert (answer.figures["differing_values"], answer.figures["differing_pairs"]) == (1, 1)


@pytest.mark.parametrize(
    ("left", "right", "ulps"),
    [(0x3F800000, 0x3F800001, 1), (0, 0x80000000, 0), (0x7FC00000, 0x7FC00001, None),
     (0x7F800000, 0x7F7FFFFF, None), (0x80000001, 0x00000001, 2)],
)  # fmt: skip
def test_bits_decide(left: int, right: int, ulps: int | None) -> None:
    """One ulp, -0.0 for 0.0, another NaN payload and infinity for the largest float all differ."""
    a, b = FloatBits.from_bits(left), FloatBits.from_bits(right)
    reference = edit(REFERENCE, 1, 2, grad_norm=a)
    found = ask("loss", reference, edit(CANDIDATE, 1, 2, grad_norm=b)).difference
    assert found is not None
    assert (found.step, found.rank, found.ulps) == (2, 1, ulps)
    assert (a.bits in found.reference, b.bits in found.candidate) == (True, True)
    assert ask("loss", reference, edit(CANDIDATE, 1, 2, grad_norm=a)).outcome == "passed"


def test_a_loss_comes_before_a_norm_then_the_rank() -> None:
    """Within a step a loss of a later rank comes before the norm of an earlier one."""
    run = edit(edit(CANDIDATE, 0, 2, grad_norm=TWO), 1, 2, loss=TWO)
    answer = ask("loss", REFERENCE, edit(run, 0, 3, loss=TWO))
    assert place(answer)[:3] == (2, 1, "loss")
    assert "2 values on ranks 0 and 1 differ, in all 3 of 8 (step, rank) pairs" in answer.message


@pytest.mark.parametrize(
    ("change", "name"),
    [({"grad_norm": None}, "grad_norm"), ({"loss": None}, "loss"),
     ({"microbatch_losses": (REFERENCE.ranks[1].steps[1].loss,)}, "microbatch_losses[1]")],
)  # fmt: skip
@pytest.mark.parametrize("expect", ["bitwise", {"atol": 1e9}])
def test_a_missing_value_differs(change: Any, name: str, expect: Any) -> None:
    """In either run, by bits and within any tolerance."""
    bare = edit(CANDIDATE, 1, 1, **change)
    for pair in ((REFERENCE, bare), (bare, REFERENCE)):
        found = ask("loss", *pair, LAB.case(expect=expect)).difference
        assert found is not None
        assert (found.step, found.rank, found.quantity) == (1, 1, name)
        assert "missing" in (found.reference, found.candidate)


# --- within a tolerance -----------------------------------------------------------------------

RTOL = 2.0**-10
ONLY: dict[str, Any] = {"loss": {}, "state": {}, "finite": {}}
FLAT = [
    edit_all(run, loss=TWO, microbatch_losses=(TWO, TWO), grad_norm=TWO)
    for run in (REFERENCE, CONTROL, CANDIDATE)
]
"""Every loss and norm is 2."""


@pytest.mark.parametrize(
    ("expect", "step", "change", "outcome"),
    [
        ({"rtol": RTOL}, 1, {"loss": f32(2 * (1 + RTOL))}, "passed"),
        ({"rtol": RTOL}, 1, {"loss": f32(2 * (1 + RTOL) + 2.0**-22)}, "failed"),
        ({"rtol": RTOL}, 1, {"loss": f32(2 * (1 - RTOL) - 2.0**-22)}, "failed"),
        *(({"atol": 0.25}, 3, change, outcome)
          for gap, outcome in ((0.25, "passed"), (0.2500002, "failed"))
          for change in ({"grad_norm": f32(2 + gap)}, {"microbatch_losses": (TWO, f32(2 + gap))})),
        # One of 2 steps x 2 ranks off by 4 gaps moves the mean by one gap; earlier steps count not.
        *(({"loss_gap": 0.25, "over": 2}, 2, {"loss": f32(2 + 4 * gap)}, outcome)
          for gap, outcome in ((0.25, "passed"), (0.2500002, "failed"), (-0.3, "failed"))),
        ({"loss_gap": 0.25, "over": 2}, 1, {"loss": f32(200)}, "passed"),
        ({"loss_gap": 1e9, "over": 4}, 2, {"loss": None}, "failed"),
        ({"loss_gap": 1.0, "over": 5}, 0, {}, "error"),
        # Digests differ and are only counted; what is not finite fails.
        ({"atol": 1.0}, 2, {"digests": {"weights": "0" * 64}}, "passed"),
        ({"atol": 1.0}, 2, {"nonfinite": {"grads": ("x",)}}, "failed"),
    ],
)  # fmt: skip
def test_the_bound_itself_is_within(expect: Any, step: int, change: Any, outcome: str) -> None:
    """Of every loss, microbatch and norm, or of the mean; beyond it the place is named."""
    run = edit(FLAT[2], 1, step, **change)
    verdict = lab.verdict_of(FLAT[0], FLAT[1], run, expect=expect, checks=ONLY)
    assert verdict.outcome == outcome
    assert outcome != "failed" or place(verdict)[:2] == (step, 1)
    if "digests" in change:
        assert lab.answers(verdict)["state"].figures["differing_tensors"] == 2


@pytest.mark.parametrize("expect", [{"rtol": 1e9, "atol": 1e9}, {"loss_gap": 1e9, "over": 4}])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("sides", [(0, 1, 2), (2,), (0, 1)])
def test_nan_is_within_no_tolerance_not_even_of_itself(
    expect: Any, value: FloatBits, sides: tuple[int, ...]
) -> None:
    """In whichever run it is, its place is named, and not that of the largest gap."""
    runs = [edit(r, 1, 3, loss=value) if i in sides else r for i, r in enumerate(FLAT)]
    runs[2] = edit(runs[2], 0, 3, loss=f32(9.0))
    loss = lab.answers(lab.verdict_of(*runs, expect=expect, checks={"loss": {}}))["loss"]
    assert (loss.outcome, place(loss)) == ("failed", (3, 1, "loss", ""))


@pytest.mark.parametrize(
    ("reference", "candidate", "excess"),
    [(2.0, 1.0, 4.0), (1.0, 2.0, 8.0), (-2.0, -1.0, 4.0), (-2.0, -2.25, 1.0), (0.0, 0.0, 0.0),
     (0.0, -1e-30, math.inf), (math.nan, math.nan, math.inf), (math.inf, math.inf, math.inf)],
)  # fmt: skip
def test_a_gap_counts_in_both_directions(reference: float, candidate: float, excess: float) -> None:
    """In units of the bound: below as above, of negative values, and of 0, where nothing is."""
    assert Close(rtol=0.125, atol=0.0).excess(reference, candidate) == excess


@pytest.mark.parametrize(
    "expect",
    [{}, {"rtol": 0.0}, {"rtol": -1.0}, {"rtol": math.nan}, {"rtol": 1.0, "over": 2},
     {"loss_gap": 1.0}, {"loss_gap": 0.0, "over": 1}, {"loss_gap": 1.0, "over": 1.5}, "about"],
)  # fmt: skip
def test_what_is_no_tolerance_is_refused(expect: Any) -> None:
    """A case cannot hold a bound that bounds nothing; it keeps a legal one in its file."""
    with pytest.raises(RecordError):
        CaseSpec.from_json(LAB.case().to_json() | {"expect": expect})
    for legal in ("rounding", {"rtol": 1e-5, "atol": 0.0}):
        case = LAB.case(expect=legal)
        assert CaseSpec.from_json(case.to_json()) == case


@pytest.mark.parametrize("expect", [{"atol": 1.0}, "rounding"])
def test_the_control_is_still_compared_bit_for_bit(expect: Any) -> None:
    """A reference that repeats itself within the tolerance only is not judged against."""
    control = edit(CONTROL, 0, 1, loss=f32(2.001))
    verdict = lab.verdict_of(REFERENCE, control, CANDIDATE, expect=expect, checks=ONLY)
    assert said(verdict) == ("incomparable", "nondeterministic_reference")


# --- within rounding --------------------------------------------------------------------------

Change = Callable[[int, int, int], float]
"""From (step, rank, place of the value) to what is added to 2."""
SIGMA = 2.0**-12
"""Of the samples below; they are powers of two off 2, so that float32 holds them."""


def rewritten(run: RunResult, change: Change) -> RunResult:
    """The run with losses and norms of 2 and what `change` adds."""
    number = len(run.ranks[0].steps[0].microbatch_losses)
    return edit_all(
        run,
        loss=lambda step, rank: f32(2 + change(step, rank, 0)),
        grad_norm=lambda step, rank: f32(2 + change(step, rank, 1)),
        microbatch_losses=lambda step, rank: tuple(
            f32(2 + change(step, rank, 2 + n)) for n in range(number)
        ),
    )


def zero(*_: int) -> float:
    return 0.0


class Case:
    """A case whose candidate and samples differ from a flat reference as stated."""

    def __init__(
        self, candidate: Change, samples: Sequence[Change], reference: Change = zero,
        lab: lab.Lab = LAB,
    ) -> None:  # fmt: skip
        self.case = lab.case(expect="rounding", checks=ONLY)
        legs = zip(lab.legs(), (reference, reference, candidate), strict=True)
        self.legs = [rewritten(run, change) for run, change in legs]
        made = zip(samples_of(self.case), samples, strict=True)
        self.samples = [rewritten(lab.run(spec), change) for spec, change in made]

    def judged(self) -> Verdict:
        return judge(self.case, *self.legs, samples=self.samples)


def even(sigma: float = SIGMA) -> list[Change]:
    """Six samples whose standard deviation is `sigma` and whose mean is the reference."""
    gap = sigma * math.sqrt((NUM_SAMPLES - 1) / NUM_SAMPLES)
    return [lambda *_, sign=sign: sign * gap for sign in (1, -1) * (NUM_SAMPLES // 2)]


BOUND = (
    within.quantile(within.FALSE_ALARM / 64, NUM_SAMPLES - 1) * math.sqrt(2) * SIGMA + 16 * 2.0**-24
)
"""The largest gap of 32 values that is within: t sqrt(2) s, and 8 roundings of 2."""


@pytest.mark.parametrize(("share", "outcome"), [(0.99, "passed"), (1.01, "failed")])
def test_a_gap_within_the_bound_passes_and_one_beyond_fails(share: float, outcome: str) -> None:
    """The first place is named, and how often the gap has the bound; `state` fails nothing."""
    made = Case(lambda *at: share * BOUND * (at == (2, 1, 1)), even())
    made.legs[2] = flip(made.legs[2], 1, 3, "weights")
    verdict = made.judged()
    assert verdict.outcome == outcome
    largest = lab.answers(verdict)["loss"].figures["largest_gap"]
    assert largest == pytest.approx(share, rel=1e-3)
    assert outcome == "passed" or place(verdict)[:3] == (2, 1, "grad_norm")
    # Digits are not asked of a value that is no number: it is beyond any bound.
    for value in (math.nan, math.inf):
        made.legs[2] = edit(made.legs[2], 0, 1, loss=f32(value))
        assert lab.answers(made.judged())["loss"].outcome == "failed"


@pytest.mark.parametrize(("spread", "off", "outcome"), [(0, 3, "passed"), (3, 0, "failed")])
def test_a_bound_never_shrinks(spread: int, off: int, outcome: str) -> None:
    """Samples that meet again later do not take back how far they were off before."""
    samples = [lambda step, *_, at=each: at(step) * (step == spread) for each in even()]
    verdict = Case(lambda step, *_: 0.9 * BOUND * (step == off), samples).judged()
    assert verdict.outcome == outcome


def test_tails_are_those_of_students_t() -> None:
    """Two-sided points of its tables, of odd and even degrees of freedom."""
    for probability, freedom, value in (
        (0.05, 1, 12.7062), (0.05, 2, 4.30265), (0.02, 3, 4.54070), (0.001, 5, 6.86883),
        (0.01, 10, 3.16927), (0.8, 1, 0.32492),
    ):  # fmt: skip
        assert within.quantile(probability, freedom) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("walks", [False, True], ids=["independent", "random_walk"])
def test_right_programs_are_refused_no_more_often_than_stated(
    monkeypatch: pytest.MonkeyPatch, *, walks: bool
) -> None:
    """Errors as wide as those of samples, fresh or added up: alarms as stated, and not fewer.

    One step of one rank has three values, each asked of twice, whose bounds no other one widens:
    there the rate is nearly the stated one. Walks of four steps only widen bounds.
    """
    stated, trials = 0.2, 300
    monkeypatch.setattr(within, "FALSE_ALARM", stated)
    size = lab.Lab(steps=4 if walks else 1, world_size=1, microbatches=1)
    draw, alarms = np.random.default_rng(20), 0
    for _ in range(trials):
        errors = draw.normal(0, 1e-3, (NUM_SAMPLES + 2, size.steps, 4))
        errors = errors.cumsum(1) if walks else errors
        made: list[Change] = [lambda step, _, at, own=own: float(own[step, at]) for own in errors]
        alarms += Case(made[0], made[2:], made[1], size).judged().outcome != "passed"
    deviation = math.sqrt(trials * stated * (1 - stated))
    assert alarms <= trials * stated + 4 * deviation
    assert walks or alarms >= trials * stated / 2


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda run: edit(run, what="crashed", message="it fell"), "crashed"),
        (lambda run: edit(run, 1, steps=run.ranks[1].steps[:2]), "missing_step"),
        (lambda run: edit(run, 1, 2, grad_norm=None), "not_run"),
        (lambda run: edit(run, 1, 2, loss=NAN), "unsupported"),
        (lambda run: edit(run, 0, start={"environment": {"fingerprint": {"torch": "1"}}}),
         "different_environment"),
    ],
)  # fmt: skip
def test_a_sample_that_is_not_whole_is_an_error(damage: Any, what: str) -> None:
    """A case is not passed for want of a bound, and its answer says which sample is at fault."""
    made = Case(zero, even())
    made.samples[4] = damage(made.samples[4])
    verdict = made.judged()
    assert said(verdict) == ("error", what)
    assert "sample 5" in verdict.message


def test_samples_of_another_number_or_work_are_an_error() -> None:
    """Five of six, the wrong six; six that trained something else, far from the reference."""
    made = Case(zero, even())
    for samples in (made.samples[1:], [], [*made.samples[1:], made.samples[0]]):
        assert judge(made.case, *made.legs, samples=samples).outcome == "error"
    far = [lambda *_, at=each: at() + 100 * SIGMA for each in even()]
    assert said(Case(lambda *_: 100 * SIGMA, far).judged()) == ("error", "unsupported")


@pytest.mark.parametrize(("gap", "outcome"), [(0.0, "passed"), (2.0**-22, "failed")])
def test_where_nothing_rounds_bits_are_due(gap: float, outcome: str) -> None:
    """Samples equal to the reference give no bound of zero; one of six that rounds gives one."""
    verdict = Case(lambda *_: gap, [zero] * NUM_SAMPLES).judged()
    assert verdict.outcome == outcome
    assert "bits are due" in lab.answers(verdict)["loss"].message
    one: list[Change] = [zero] * (NUM_SAMPLES - 1)
    assert Case(lambda *_: gap, [*one, lambda *_: SIGMA / 8]).judged().outcome == "passed"


def test_losses_of_bfloat16_may_be_a_few_of_its_roundings_off() -> None:
    """Values that are all bfloat16 have its gaps: one is 2^-7 of a number, not 2^-23."""
    gap = 2.0**-6  # of numbers from 2 on: one

    def varied(step: int, rank: int, place: int) -> float:
        return (step + 4 * rank) * gap + (place == 1) / 3

    samples: list[Change] = [varied] * (NUM_SAMPLES - 1)
    samples.append(lambda *at: varied(*at) + 2.0**-22 * (at[2] == 1))
    for norm, outcome in ((False, "passed"), (True, "failed")):
        off: Change = lambda *at, norm=norm: varied(*at) + gap * ((at[2] == 1) == norm)  # noqa: E731
        assert Case(off, samples, varied).judged().outcome == outcome
