"""What differs between two runs is found where it is: losses, state, NaN, samples read."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsdp_core.config import ParallelConfig
from fsdp_core.config.parallel import Dense, dense_coordinates
from harness.checks import bits, judge
from harness.checks.bits import same_data
from harness.records import (
    ABSENT,
    AFTER,
    COPIES,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    OTHERS,
    SAMPLES,
    CaseSpec,
    FloatBits,
    RecordError,
    RunResult,
    Verdict,
)
from harness.repeats import NUM_SAMPLES, samples_of
from tests.support import run_records as lab
from tests.support.run_records import (
    CANDIDATE,
    CONTROL,
    INF,
    LAB,
    NAN,
    REFERENCE,
    TENSORS,
    Edit,
    ask,
    at,
    bit,
    both,
    configured,
    edit,
    edit_all,
    f32,
    flip,
    place,
    said,
    same,
)

WIDE_REFERENCE, _, WIDE_CANDIDATE = lab.Lab(world_size=16).legs()
BOTH = (REFERENCE, CANDIDATE)
TWO = f32(2.0)


def named(rank: int, names: tuple[str, ...]) -> Edit:
    """Weights of a rank that are called otherwise."""
    return lambda run: edit(run, rank, start={"tensors": {"weights": names}})


def exchanged(run: RunResult) -> RunResult:
    left, right = (run.ranks[rank].steps[1].digests for rank in (0, 1))
    return edit(edit(run, 0, 1, digests=right), 1, 1, digests=left)


def repeated(run: RunResult) -> RunResult:
    """A second record of a step, after a wrong one."""
    steps = run.ranks[0].steps
    return edit(run, 0, steps=(steps[0], flip(run, 0, 1, "optim").ranks[0].steps[1], *steps[1:]))


def digests(change: Callable[[dict[str, str]], dict[str, str]]) -> Edit:
    def changed(run: RunResult) -> RunResult:
        steps = list(run.ranks[0].steps)
        steps[1] = replace(steps[1], digests=change(steps[1].digests))
        return edit(run, 0, steps=tuple(steps))

    return changed


def strategies(ours: str, theirs: str) -> tuple[Edit, Edit]:
    """Compute copies of one tensor differ in step 3, under a strategy of each side."""

    def side(strategy: str, copy: str) -> Edit:
        def changed(run: RunResult) -> RunResult:
            for rank in (0, 1):
                run = edit(run, rank, start={"tensors": {COPIES: ("embed.weight",)}})
                run = edit(run, rank, 3, digests={COPIES: copy * 32})
            return configured(run, fsdp={"strategy": strategy})

        return changed

    return side(ours, "a"), side(theirs, "b")


def extra(run: RunResult) -> RunResult:
    """Rank 1 has a gradient that rank 0 has not."""
    run = edit(run, 1, start={"tensors": {"grads": (*TENSORS["grads"], "tail.weight")}})
    for step, record in enumerate(run.ranks[1].steps):
        run = edit(run, 1, step, digests={"grads": record.digests["grads"] + "1" * 32})
    return run


WEIGHTS, W = TENSORS["weights"], "weights"
BAD = {"nonfinite": {"grads": ("x",)}}
NOT_FINITE: list[tuple[dict[str, Any], str, str]] = [
    *(({"loss": bad}, "loss", "") for bad in (NAN, INF)),
    ({"microbatch_losses": (f32(1.0), NAN)}, "microbatch_losses[1]", ""),
    ({"grad_norm": INF}, "grad_norm", ""),
    *(({"nonfinite": {g: ("x",)}}, g, "x") for g in (*DIGEST_GROUPS, "buffers")),
    ({"grad_norm": NAN, "nonfinite": {W: ("w",), "grads": ("x",)}}, "grads", "x"),
    ({"grad_norm": NAN, "nonfinite": {"optim": ("w",)}}, "grad_norm", ""),
    ({"evaluation": NAN, "nonfinite": {"optim": ("w",)}}, "optim", "w"),
]
"""Changes, and what is named: where it was computed first; the norm is made of the gradients."""
FAULTS: list[tuple[str, Edit, Edit, tuple[Any, ...]]] = [
    # check, edits of reference and candidate, step, rank, quantity and tensor of the difference
    *(("state", same, bit(rank, step, group, n), (step, rank, group, TENSORS[group][n // 128]))
      for rank in (0, 7, 8, 15)
      for step, group, n in ((-1, W, 130), (-1, "rng", 0), (3, "optim", 255),
                             *((0, group, 127) for group in TENSORS))),
    # By step, then group, then tensor, and only then by rank.
    ("state", same, both(bit(0, 3, "grads"), bit(0, 2, W), bit(0, 2, "grads", 200),
                         bit(1, 2, "grads", 5)), (2, 1, "grads", "embed.weight")),
    ("state", same, both(bit(0, 0, W), bit(1, -1, "rng")), (-1, 1, "rng", "cpu")),
    ("state", same, both(bit(1, 1, "optim"), bit(0, 1, "rng")), (1, 1, "optim")),
    ("state", same, both(bit(0, 1, "grads"), bit(1, 1, "samples", 128)), (1, 1, "samples")),
    ("state", extra, both(bit(1, 2, "grads", 2 * 128), bit(0, 2, W), extra),
     (2, 1, "grads", "tail.weight")),
    *(("state", *sides, (0, rank, "tensors.weights")) for rank in (1, 15)
      for names in (WEIGHTS[::-1], (*WEIGHTS, "extra"), ())
      for sides in ((same, named(rank, names)), (named(rank, names), same))),
    ("state", same, exchanged, (1, 0)), ("state", same, repeated, (1, 0, "optim")),
    *(("state", same, digests(change), (1, 0)) for change in (
        lambda d: d | {"grads": d["grads"][:-3]}, lambda d: d | {"grads": d["grads"] + "ab"},
        lambda d: {"grads": d["grads"]}, lambda d: {}, lambda d: d | {"novel": "00" * 16})),
    ("state", *strategies("optim", "optim"), (3, 0, COPIES)),
    *(("finite", same, both(at(rank, 2, **change), at(3, 3, loss=NAN)), (2, rank, *told))
      for rank in (0, 15) for change, *told in NOT_FINITE),
    # Nothing that is trained is excused by the reference, no loss by a step that was skipped.
    ("finite", at(0, 1, **BAD), at(0, 1, **BAD), (1, 0, "grads")),
    ("finite", at(0, 1, nonfinite={W: ("w",)}), at(0, 1, nonfinite={W: ("w",)}), (1, 0, W)),
    ("finite", same, at(0, 1, nonfinite={W: ("w",)}, skipped="scaler"), (1, 0, W)),
    ("finite", same, at(0, 1, loss=NAN, skipped="scaler"), (1, 0, "loss")),
    # One ulp, -0.0 for 0.0, another NaN, infinity for the largest float, and what is missing.
    *(("loss", at(rank, step, **{name: FloatBits.from_bits(left)}),
       at(rank, step, **{name: FloatBits.from_bits(right)}), (step, rank, name))
      for rank, step in ((0, 0), (8, 3), (15, 3)) for name in ("loss", "grad_norm")
      for left, right in ((0x3F800000, 0x3F800001), (0, 0x80000000), (0x7FC00000, 0x7FC00001),
                          (0x7F800000, 0x7F7FFFFF))),
    ("loss", same, at(1, 1, microbatch_losses=(TWO, TWO)), (1, 1, "microbatch_losses[0]")),
    *(("loss", *sides, (1, 1, name))
      for change, name in (({"grad_norm": None}, "grad_norm"), ({"loss": None}, "loss"),
                           ({"microbatch_losses": ()}, "microbatch_losses[0]"))
      for sides in ((same, at(1, 1, **change)), (at(1, 1, **change), same))),
    # An update that one run alone left out, and what comes before it in its step.
    *(("loss", at(1, 1, skipped=left), at(1, 1, skipped=right), (1, 1, "skipped"))
      for left, right in (("", "scaler"), ("scaler", ""))),
    ("loss", same, at(1, 1, skipped="scaler", grad_norm=TWO), (1, 1, "grad_norm")),
    # An evaluation, also where one run alone has it.
    *(("loss", at(1, 1, evaluation=left), at(1, 1, evaluation=TWO), (1, 1, "evaluation"))
      for left in (None, f32(1.0))),
    # In a step a loss of a later rank comes before the norm of an earlier one.
    ("loss", same, both(at(0, 2, grad_norm=TWO), at(1, 2, loss=TWO), at(0, 3, loss=TWO)),
     (2, 1, "loss")),
]  # fmt: skip


@pytest.mark.parametrize(("check", "ours", "theirs", "first"), FAULTS)
def test_what_differs_is_found_where_it_is(
    check: str, ours: Edit, theirs: Edit, first: Any
) -> None:
    """Any bit of any step and rank of 16; nothing is found where nothing was planted."""
    assert ask(check, WIDE_REFERENCE, WIDE_CANDIDATE).outcome == "passed"
    answer = ask(check, ours(WIDE_REFERENCE), theirs(WIDE_CANDIDATE))
    assert said(answer) == ("failed", "nonfinite" if check == "finite" else "diverged")
    assert place(answer)[: len(first)] == first


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        strategies("optim", "grads"),
        (at(0, 1, nonfinite={"buffers": ("mask",)}), at(0, 1, nonfinite={"buffers": ("mask",)})),
        (same, at(0, 1, nonfinite={"grads": ("x",)}, grad_norm=NAN, skipped="scaler")),
    ],
)  # fmt: skip
def test_what_is_excused(ours: Edit, theirs: Edit) -> None:
    """Copies that strategies keep otherwise, a mask of both runs, gradients of a skipped step."""
    for check in ("state", "finite"):
        assert ask(check, ours(REFERENCE), theirs(CANDIDATE)).outcome == "passed"


def others(**digests: str) -> Edit:
    """Modules without an optimizer of rank 0, with a digest in step 2: `f` none, `-` none ever."""

    def changed(run: RunResult) -> RunResult:
        names = tuple(f"{name.replace('_', '#')}.bias" for name in digests)
        run = edit(run, 0, start={"tensors": {OTHERS: names}})
        for step in range(4):
            shown = (each if step == 2 or each == "-" else "0" for each in digests.values())
            text = "".join(each.replace("-", "f") * DIGEST_HEX_CHARS for each in shown)
            run = edit(run, 0, step, digests={OTHERS: text})
        return configured(run, program={"target": "train.py"})

    return changed


@pytest.mark.parametrize(
    ("ours", "theirs", "found", "left_out"),
    [
        ({"EMA": "1"}, {"EMA": "1"}, False, 0), ({"EMA": "1"}, {"EMA": "2"}, True, 0),
        ({"EMA": "1"}, {"EMA": "f"}, False, 0),  # until the garbage is collected
        ({"EMA": "1", "EMA_2": "2"}, {"EMA": "2", "EMA_2": "f"}, False, 0),  # the first is gone
        ({"EMA": "1", "EMA_2": "2"}, {"EMA": "2", "EMA_2": "3"}, True, 0),
        ({"EMA": "1", "EMA_2": "2"}, {"EMA": "3", "EMA_2": "-"}, False, 2),
        ({"EMA": "1", "Twin": "-"}, {"EMA": "1", "Twin": "2"}, False, 1),
        ({"EMA": "1", "Twin": "-"}, {"EMA": "2", "Twin": "2"}, True, 1),
    ],
)  # fmt: skip
def test_modules_without_an_optimizer_are_compared_where_both_runs_have_them(
    ours: dict[str, str], theirs: dict[str, str], found: bool, left_out: int
) -> None:
    """By class, where both have as many; one of which a run has more is left out, and said."""
    answer = ask("state", others(**ours)(REFERENCE), others(**theirs)(CANDIDATE))
    assert answer.outcome == ("failed" if found else "passed")
    if found:
        assert place(answer)[:4] == (2, 0, OTHERS, "EMA.bias")
    else:
        assert answer.figures.get("left_out", 0) == left_out


def left(run: RunResult, *digests: str, rank: int = 0) -> RunResult:
    """The run with the state after its last step on a rank, a digest a tensor."""
    group = f"weights{AFTER}"
    run = edit(run, rank, start={"tensors": {group: ("a", "b")}})
    for step in range(4):
        text = "".join(each * DIGEST_HEX_CHARS for each in (digests if step == 3 else "ff"))
        run = edit(run, rank, step, digests={group: text})
    return run


def test_the_state_after_the_last_step_is_compared_where_both_runs_have_it() -> None:
    """A difference is of that moment; what one run alone has is no difference, and said."""
    answer = ask("state", left(REFERENCE, "1", "2"), left(CANDIDATE, "1", "3"))
    assert place(answer)[:4] == (3, 0, f"weights{AFTER}", "b")
    assert "b (weights after the last step) differs first after the last step" in answer.message
    answer = ask("state", left(REFERENCE, "1", "2"), left(CANDIDATE, "1", "f"))
    assert (answer.outcome, answer.figures["left_out"]) == ("passed", 1)
    alone = ask("state", REFERENCE, left(CANDIDATE, "1", "2"))
    assert alone.outcome == "passed"
    assert "one run alone has its state after the last step" in alone.message


def test_a_rank_that_ended_too_early_for_its_last_state_is_left_out_alone() -> None:
    """As a killed attempt has it: rank 0 wrote the state after the last step, rank 1 did not."""
    whole = left(left(REFERENCE, "1", "2"), "1", "2", rank=1)
    assert ask("state", whole, left(CANDIDATE, "1", "2")).outcome == "passed"
    answer = ask("state", whole, left(CANDIDATE, "1", "3"))
    assert place(answer)[:4] == (3, 0, f"weights{AFTER}", "b")


def test_an_evaluation_that_one_run_was_not_asked_for_is_no_difference() -> None:
    """A value of both is compared all the same."""
    asked = configured(CANDIDATE, evaluate_every=2)
    assert ask("loss", REFERENCE, at(0, 1, evaluation=TWO)(asked)).outcome == "passed"
    assert ask("loss", at(0, 1, evaluation=f32(1.0))(REFERENCE),
               at(0, 1, evaluation=TWO)(asked)).outcome == "failed"  # fmt: skip


@pytest.mark.parametrize("expect", ["bitwise", {"rtol": 1e-6, "atol": 0}])
def test_a_norm_that_both_skip_for_is_within_any_tolerance(expect: Any) -> None:
    """A norm that is no number is beyond one where an update was made by it."""
    for skipped, outcome in (("scaler", "passed"), ("", "failed")):
        legs = [at(0, 1, grad_norm=NAN, skipped=skipped)(run) for run in BOTH]
        answer = ask("loss", *legs, LAB.case(expect=expect))
        assert answer.outcome == ("passed" if expect == "bitwise" else outcome)


def test_a_step_that_one_run_left_out_is_said() -> None:
    """Beside the tensor that differs first: gradients that are missing are no cause."""
    ours, theirs = BOTH
    found = ask("state", ours, at(1, 2, skipped="overflow")(flip(theirs, 1, 2, W)))
    assert "; only the candidate skipped its optimizer step on rank 1: overflow; " in found.message
    assert "left its" not in ask("state", ours, flip(theirs, 1, 2, W)).message


def test_a_setting_of_an_optimizer_comes_before_the_weights_that_it_decides() -> None:
    """A learning rate is the cause; moments and weights follow, gradients come before it."""
    tensors = dict(TENSORS) | {"optim": ("embed.weight.exp_avg", "group0.lr")}
    ours, _, other = lab.Lab(tensors=tensors).legs()
    weights_too = flip(flip(other, 1, 2, "optim", 128), 0, 2, W)
    for run, quantity in ((weights_too, "optim"), (flip(weights_too, 1, 2, "grads"), "grads"),
                          (flip(flip(other, 1, 2, "optim"), 0, 2, W), W)):  # fmt: skip
        found = ask("state", ours, run).difference
        assert found is not None
        assert found.quantity == quantity


def test_answers_count_what_they_compared() -> None:
    """Pairs of step and rank, tensors, ulps; and what the loss alone would have shown, and when."""
    assert ask("state", *BOTH).figures == {"digests": (5 + 9 * 4) * 2, "differing_pairs": 0}
    assert ask("loss", WIDE_REFERENCE, WIDE_CANDIDATE).figures == {
        "pairs": 16 * 4, "differing_pairs": 0,
    }  # fmt: skip
    broken = flip(CANDIDATE, 1, 0, "weights")
    answer = ask("state", REFERENCE, broken)
    counts = {"differing_tensors": 1, "differing_ranks": 1, "differing_pairs": 1, "pairs": 10}
    assert answer.figures == counts
    assert "bits of the loss never differ, its 5 decimals never differ" in answer.message
    ours = edit(edit(REFERENCE, 0, 1, loss=TWO), 0, 3, loss=TWO)
    theirs = edit(edit(broken, 0, 1, loss=f32(2.00000024)), 0, 3, loss=f32(2.5))
    shown = "the bits of the loss differ first at step 1, its 5 decimals differ first at step 3"
    assert shown in ask("state", ours, theirs).message
    found = ask("loss", ours, theirs).difference
    assert found is not None
    assert found.ulps == 1


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
    """One step of other samples, too few to tell, one token or two in all."""
    run = read(lab.Lab(steps=steps).legs()[0], choice, parallel={"dp": 2}, **config)
    assert (same_data(run, "reference") is not None) == is_found


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
        *(({"atol": 1e9}, 1, change, "failed") for change in (
            {"grad_norm": None}, {"loss": None}, {"microbatch_losses": (TWO,)})),
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


@pytest.mark.parametrize(
    ("expect", "reference", "candidate", "outcome"),
    [
        ({"rtol": RTOL}, -2.0, -2.0 * (1 + RTOL), "passed"),
        ({"rtol": RTOL}, -2.0, -2.0 * (1 + RTOL) - 2.0**-22, "failed"),
        ({"rtol": RTOL}, 0.0, 0.0, "passed"),
        ({"rtol": RTOL}, 0.0, 2.0**-100, "failed"),
        ({"rtol": RTOL, "atol": 2.0**-99}, 0.0, 2.0**-100, "passed"),
    ],
)
def test_a_relative_bound_is_of_the_size_of_the_reference(
    expect: Any, reference: float, candidate: float, outcome: str
) -> None:
    """Of a loss below 0, too; of a loss of 0 it is 0, and bits are due."""
    values = (reference, reference, candidate)
    runs = [edit(run, 1, 1, loss=f32(value)) for run, value in zip(FLAT, values, strict=True)]
    assert lab.verdict_of(*runs, expect=expect, checks=ONLY).outcome == outcome


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


def table(errors: Any) -> Change:
    """By step and place."""
    return lambda step, rank, place: float(errors[step, place])


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


BOUND = bits.quantile(bits.FALSE_ALARM / 64, NUM_SAMPLES - 1) * math.sqrt(2) * SIGMA + 16 * 2.0**-24
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


@pytest.mark.parametrize("walks", [False, True], ids=["independent", "random_walk"])
def test_right_programs_are_refused_no_more_often_than_stated(
    monkeypatch: pytest.MonkeyPatch, *, walks: bool
) -> None:
    """Errors as wide as those of samples, fresh or added up: alarms as stated, and not fewer."""
    stated, trials = 0.2, 200
    monkeypatch.setattr(bits, "FALSE_ALARM", stated)
    size = lab.Lab(steps=4 if walks else 1, world_size=1, microbatches=1)
    draw, alarms = np.random.default_rng(20), 0
    flat = Case(zero, [zero] * NUM_SAMPLES, lab=size)
    for _ in range(trials):
        errors = draw.normal(0, 1e-3, (NUM_SAMPLES + 2, size.steps, 4))
        errors = errors.cumsum(1) if walks else errors
        made = [table(each) for each in errors]
        legs = [rewritten(run, made[int(n < 2)]) for n, run in enumerate(flat.legs)]
        samples = [rewritten(*each) for each in zip(flat.samples, made[2:], strict=True)]
        alarms += judge(flat.case, *legs, samples=samples).outcome != "passed"
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


def test_a_sample_counted_twice_is_no_second_sample() -> None:
    """Six samples of five seeds measure no spread: the case has no verdict."""
    made = Case(zero, even())
    made.samples[4] = made.samples[3]
    assert said(made.judged()) == ("error", "not_run")


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
