"""Which answer decides a case, of the built-in trainer and of other programs."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checks import CHECKS, Check, evidence, exact, exit_code, judge
from harness.checks.complete import find_flaw
from harness.checks.judge import cause_of
from harness.program.spec import ProgramSpec
from harness.records import (
    ABSENT,
    OUTCOMES,
    CaseSpec,
    CheckResult,
    EndRecord,
    ErrorRecord,
    EventRecord,
    FloatBits,
    InitialRecord,
    NamesRecord,
    RankExit,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
    Verdict,
)
from harness.store.streams import aligned, with_all_names
from tests.unit.harness.checks.conftest import flaw_of, place_of

NAN = FloatBits.from_bits(0x7FC00000)
RELAXED = settings(max_examples=40, deadline=None)


def crash(run: Any, edit: Any, what: str = "hang") -> Any:
    return edit.outcome(run, what=what, message=f"rank 1: {what}", culprit_rank=1)


def ulp(run: Any, edit: Any, rank: int, step: int) -> Any:
    bits = int(run.ranks[rank].steps[step].loss.bits, 16)
    return edit.step(run, rank, step, loss=FloatBits.from_bits(bits ^ 1))


def test_identical_runs_pass(lab: Any) -> None:
    """Three whole and equal runs pass, with every answer kept and the run keys named."""
    verdict = judge(lab.case(), *lab.legs(), wall_s=2.5)
    assert (verdict.outcome, verdict.what, verdict.wall_s) == ("passed", "", 2.5)
    assert {r.outcome for r in verdict.checks} == {"passed"}
    assert set(lab.case().checks) <= {r.check for r in verdict.checks}
    assert verdict.runs["control"] == lab.case().control.key


@RELAXED
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_identical_runs_of_any_size_pass(
    make_lab: Any, steps: int, world_size: int, microbatches: int
) -> None:
    """No right program fails, whatever its steps, ranks and microbatches."""
    lab = make_lab(steps, world_size, microbatches)
    assert judge(lab.case(), *lab.legs()).outcome == "passed"


@pytest.mark.parametrize("what", ["hang", "oom", "illegal_access", "crashed", "killed"])
def test_crash_is_named_on_the_candidate(lab: Any, edit: Any, what: str) -> None:
    """A candidate that did not finish fails with what happened to it."""
    reference, control, candidate = lab.legs()
    verdict = judge(lab.case(), reference, control, crash(candidate, edit, what))
    assert (verdict.outcome, verdict.what) == ("failed", what)
    assert "candidate" in verdict.message
    kept = {r.check: r.outcome for r in verdict.checks}
    assert kept["loss"] == "skipped"


@pytest.mark.parametrize("leg", ["reference", "control"])
def test_other_legs_are_never_the_candidates_fault(lab: Any, edit: Any, leg: str) -> None:
    """A reference or control that did not finish is an error naming the leg, crash or not."""
    runs = dict(zip(("reference", "control", "candidate"), lab.legs(), strict=True))
    runs[leg] = crash(runs[leg], edit)
    for candidate in (runs["candidate"], crash(runs["candidate"], edit, "oom")):
        verdict = judge(lab.case(), runs["reference"], runs["control"], candidate)
        assert (verdict.outcome, verdict.what) == ("error", "hang")
        assert leg in verdict.message


@pytest.mark.parametrize("what", ["interrupted", "not_run", "unsupported", "shared_gpu"])
def test_stopped_candidate_has_no_verdict(lab: Any, edit: Any, what: str) -> None:
    """A candidate that was stopped or never started is an error, not a failure."""
    reference, control, candidate = lab.legs()
    verdict = judge(lab.case(), reference, control, crash(candidate, edit, what))
    assert (verdict.outcome, verdict.what) == ("error", what)


@pytest.mark.parametrize("leg", ["reference", "control", "candidate"])
@pytest.mark.parametrize("what", ["", "illegal_access"])
def test_an_end_that_is_not_decided_has_no_verdict(
    lab: Any, edit: Any, leg: str, what: str
) -> None:
    """Neither a pass nor a failure is believed before it is known whose end it was."""
    runs = dict(zip(("reference", "control", "candidate"), lab.legs(), strict=True))
    runs[leg] = edit.outcome(runs[leg], what=what, undecided=True)
    verdict = judge(lab.case(), *runs.values())
    assert (verdict.outcome, verdict.what) == ("error", "shared_gpu")
    assert leg in verdict.message


def test_nondeterministic_reference(lab: Any, edit: Any) -> None:
    """A reference that differs from its control is incomparable, and the place is given."""
    reference, control, candidate = lab.legs()
    for broken in (ulp(control, edit, 1, 2), edit.digest(control, 1, 2, "optim", 7)):
        verdict = judge(lab.case(), reference, broken, candidate)
        assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")
        where = place_of(verdict)
        assert (where.step, where.rank) == (2, 1)
        crashed = judge(lab.case(), reference, broken, crash(candidate, edit))
        assert crashed.what == "nondeterministic_reference"


def test_different_environment(lab: Any, edit: Any) -> None:
    """Legs of different environments are incomparable, even where their bits differ."""
    reference, control, candidate = lab.legs()
    start = dataclasses.replace(candidate.ranks[0].start, environment={"torch": "2.13"})
    moved = ulp(edit.rank(candidate, 0, start=start), edit, 0, 1)
    verdict = judge(lab.case(), reference, control, moved)
    assert (verdict.outcome, verdict.what) == ("incomparable", "different_environment")
    assert judge(lab.case(), reference, control, crash(moved, edit)).what == "hang"


def test_a_control_of_another_environment(lab: Any, edit: Any) -> None:
    """Two runs of the reference prove nothing of each other where their environments differ."""
    reference, control, candidate = lab.legs()
    start = dataclasses.replace(control.ranks[1].start, environment={"torch": "2.13"})
    verdict = judge(lab.case(), reference, edit.rank(control, 1, start=start), candidate)
    assert (verdict.outcome, verdict.what) == ("incomparable", "different_environment")
    assert verdict.check == "environment:control"


def test_an_incomplete_reference_is_compared_with_nothing(lab: Any, edit: Any) -> None:
    """Checks over what is left of it are not run, rather than passed."""
    reference, control, candidate = lab.legs()
    short = edit.rank(reference, 1, steps=reference.ranks[1].steps[:-1])
    kept = {r.check: r.outcome for r in judge(lab.case(), short, control, candidate).checks}
    assert {kept[name] for name in lab.case().checks} == {"skipped"}


def test_a_check_that_did_not_run_is_no_pass(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its reason, whole runs have no verdict without its answer."""
    skipped = CheckResult(check="loss", outcome="skipped", what="not_run", message="not run")
    monkeypatch.setitem(CHECKS, "loss", Check(run=lambda *_: skipped, doc=""))
    verdict = judge(lab.case(), *lab.legs())
    assert (verdict.outcome, verdict.what) == ("error", "not_run")


def test_most_explanatory_failure_is_told(lab: Any, edit: Any) -> None:
    """Missing records, then non-finite, then the earliest difference, then memory."""
    reference, control, candidate = lab.legs()
    case = lab.case(checks=lab.case().checks | {"peak_memory": {"max_ratio": 0.5}})
    verdict = judge(case, reference, control, candidate)
    assert verdict.what == "memory_regression"
    candidate = edit.digest(candidate, 0, 3, "weights", 0)
    verdict = judge(case, reference, control, candidate)
    where = place_of(verdict)
    assert (where.quantity, where.step) == ("weights", 3)
    candidate = ulp(candidate, edit, 1, 2)
    verdict = judge(case, reference, control, candidate)
    where = place_of(verdict)
    assert (where.quantity, where.step) == ("loss", 2)
    assert "also failed: state, peak_memory" in verdict.message
    candidate = edit.step(candidate, 1, 3, grad_norm=NAN)
    assert judge(case, reference, control, candidate).what == "nonfinite"
    steps = candidate.ranks[0].steps[:-1]
    verdict = judge(case, reference, control, edit.rank(candidate, 0, steps=steps))
    assert (verdict.what, verdict.outcome) == ("missing_step", "failed")
    assert "finite" in verdict.message


def test_whole_records_are_not_called_incomplete(lab: Any, edit: Any) -> None:
    """Only of a run that lacks a step or a rank is that said; its flaw is the verdict's."""
    reference, control, candidate = lab.legs()
    short = edit.rank(candidate, 0, steps=candidate.ranks[0].steps[:-1])
    error = ErrorRecord(rank=0, step=1, message="", traceback="", what="crashed", type="ValueError")
    both = edit.rank(candidate, 0, error=error)
    for run, what in ((short, "missing_step"), (both, "record_after_end")):
        verdict = judge(lab.case(), reference, control, run)
        assert verdict.what == what
        assert ("incomplete" in verdict.message) == (what == "missing_step")


def test_named_tensor_wins_a_tie(lab: Any, edit: Any) -> None:
    """Where loss and state first differ in the same step the tensor is told."""
    reference, control, candidate = lab.legs()
    candidate = ulp(edit.digest(candidate, 1, 2, "weights", 0), edit, 0, 2)
    verdict = judge(lab.case(), reference, control, candidate)
    where = place_of(verdict)
    assert where.tensor == "embed.weight"


def test_nothing_passes_unasked(lab: Any) -> None:
    """No checks, an unknown check or a check without a limit give no verdict."""
    unasked: list[dict[str, Any]] = [
        {},
        {"los": {}},
        {"loss": {}, "peak_memory": {}},
        {"loss": {"rtol": 1}},
    ]
    for checks in unasked:
        verdict = judge(lab.case(checks=checks), *lab.legs())
        assert verdict.outcome == "error"


def test_a_failure_outranks_a_check_without_answer(lab: Any, edit: Any) -> None:
    """A difference is reported as a failure although another check could not answer."""
    reference, control, candidate = lab.legs()
    case = lab.case(checks={"los": {}, "loss": {}})
    assert judge(case, reference, control, ulp(candidate, edit, 0, 1)).outcome == "failed"


def test_skip_reason_is_passed_on(lab: Any, edit: Any) -> None:
    """A case that was skipped stays skipped, with its reason."""
    verdict = judge(lab.case(skip_reason="needs 8 GPUs"), *lab.legs())
    assert (verdict.outcome, verdict.message) == ("skipped", "needs 8 GPUs")


def test_vacuous_plans_are_refused(lab: Any) -> None:
    """A control or candidate that is the reference itself, or stray records, prove nothing."""
    case, (reference, control, candidate) = lab.case(), lab.legs()
    for broken, runs in (
        (dataclasses.replace(case, control=case.reference), (reference, reference, candidate)),
        (dataclasses.replace(case, candidate=case.reference), (reference, control, reference)),
        (case, (reference, control, control)),
        (case, (candidate, control, candidate)),
        (dataclasses.replace(case, control=case.candidate), (reference, candidate, candidate)),
    ):
        verdict = judge(broken, *runs)
        assert verdict.outcome == "error"


def test_a_control_of_other_ranks_is_refused(lab: Any, make_lab: Any) -> None:
    """The same configuration on more ranks is not a second run of the reference."""
    reference, _, candidate = lab.legs()
    spec = dataclasses.replace(lab.spec(replica=1), world_size=3)
    wide = make_lab(world_size=3).run(spec)
    case = dataclasses.replace(lab.case(), control=wide.spec)
    verdict = judge(case, reference, wide, candidate)
    assert (verdict.outcome, verdict.check, verdict.what) == ("error", "plan", "not_run")


def test_layouts_of_different_size_are_not_compared(lab: Any, make_lab: Any) -> None:
    """Legs with another number of ranks, steps or microbatches have no verdict."""
    reference, control, _ = lab.legs()
    for other in (make_lab(world_size=3), make_lab(steps=5), make_lab(microbatches=1)):
        candidate = other.legs()[2]
        verdict = judge(
            dataclasses.replace(lab.case(), candidate=candidate.spec), reference, control, candidate
        )
        assert (verdict.outcome, verdict.what) == ("error", "unsupported")


@RELAXED
@given(data=st.data())
def test_removing_any_record_is_blamed_on_its_leg(lab: Any, edit: Any, data: st.DataObject) -> None:
    """A lost record is a failure of the candidate, and an error of any other leg."""
    runs = list(lab.legs())
    leg = data.draw(st.integers(0, 2))
    rank = data.draw(st.integers(0, 1))
    place = data.draw(st.integers(0, lab.steps - 1))
    steps = runs[leg].ranks[rank].steps
    runs[leg] = edit.rank(runs[leg], rank, steps=steps[:place] + steps[place + 1 :])
    verdict = judge(lab.case(), *runs)
    assert (verdict.outcome, verdict.what) == ("failed" if leg == 2 else "error", "missing_step")


def verdict(outcome: Any) -> Verdict:
    return Verdict(
        case_id="c", outcome=outcome, what="", message="", checks=(), runs={}, wall_s=0.0
    )


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([], 5),
        (["skipped"], 5),
        (["passed"], 0),
        (["passed", "skipped"], 0),
        (["passed", "error"], 6),
        (["skipped", "incomparable"], 6),
        (["passed", "error", "failed"], 1),
    ],
)
def test_exit_codes(outcomes: list[str], code: int) -> None:
    """The exit code of a set of verdicts is as the design's table says."""
    assert exit_code(verdict(outcome) for outcome in outcomes) == code


@given(st.lists(st.sampled_from(OUTCOMES)))
def test_zero_only_if_something_passed_and_nothing_else_went_wrong(outcomes: list[str]) -> None:
    """Exit code 0 needs a pass and allows only skips beside it."""
    good = "passed" in outcomes and set(outcomes) <= {"passed", "skipped"}
    assert (exit_code(verdict(o) for o in outcomes) == 0) == good


def _results(verdict: Any) -> dict[str, tuple[str, str]]:
    return {result.check: (result.outcome, result.what) for result in verdict.checks}


def test_state_runs_without_being_asked(lab: Any, edit: Any) -> None:
    """A digest that differs fails a case that asks for the loss alone."""
    case = lab.case(checks={"loss": {}})
    reference, control, candidate = lab.legs()
    verdict = judge(case, reference, control, edit.digest(candidate, 1, 2, "weights", 5))
    assert (verdict.outcome, verdict.what) == ("failed", "diverged")
    assert _results(verdict)["state"] == ("failed", "diverged")


def test_nan_in_all_runs_fails_without_being_asked(lab: Any, edit: Any) -> None:
    """Runs with equal NaNs are equal, and no pass."""
    bad = [edit.step(run, 0, 1, nonfinite={"grads": ("head.weight",)}) for run in lab.legs()]
    verdict = judge(lab.case(checks={"state": {}}), *bad)
    assert (verdict.outcome, verdict.what) == ("failed", "nonfinite")


def test_state_reports_within_a_tolerance(lab: Any, edit: Any) -> None:
    """With a tolerance on the loss, a digest that differs is counted and fails nothing."""
    case = lab.case(checks={"loss": {}}, expect={"rtol": 1e-5, "atol": 0.0})
    reference, control, candidate = lab.legs()
    verdict = judge(case, reference, control, edit.digest(candidate, 1, 2, "weights", 5))
    assert (verdict.outcome, _results(verdict)["state"][0]) == ("passed", "passed")
    (state,) = (result for result in verdict.checks if result.check == "state")
    assert state.figures["differing_pairs"] == 1


@pytest.mark.parametrize(
    ("change", "is_compared"),
    [
        ({"engine": "fsdp2"}, False),
        ({"parallel": {"dp": 1, "tp": 2}}, False),
        ({"fsdp": {"strategy": "no_shard"}}, False),
        ({"fsdp": {"strategy": "optim"}}, True),
        ({"parallel": {"dp": 2, "sequence_parallel": False}}, True),
    ],
)
def test_state_of_other_parts_is_said_not_to_be_compared(
    lab: Any, edit: Any, change: dict[str, Any], is_compared: bool
) -> None:
    """Ranks of two engines or layouts hold other parts: the verdict says so as data, and passes."""
    base = lab.spec()
    config = base.config | {"parallel": {"dp": 2}, "fsdp": {"strategy": "optim_grads_params"}}
    specs = [
        dataclasses.replace(base, config=values, replica=replica)
        for values, replica in ((config, 0), (config, 1), (config | change, 0))
    ]
    if not change.get("engine"):
        specs[2] = dataclasses.replace(specs[2], timeout_s=61.0)  # a run of its own, whatever
    runs = [lab.run(spec) for spec in specs]
    case = lab.case(checks={"loss": {}}, reference=specs[0], control=specs[1], candidate=specs[2])
    verdict = judge(case, runs[0], runs[1], edit.digest(runs[2], 1, 2, "weights", 5))
    if is_compared:
        assert (verdict.outcome, verdict.what) == ("failed", "diverged")
    else:
        assert (verdict.outcome, _results(verdict)["state"]) == (
            "passed", ("skipped", "other_parts"),
        )  # fmt: skip


Held = dict[str, dict[str, str]]
"""Group to name to a digest in short."""
BEFORE: Held = {"weights": {"w": "1"}, "optim": {"lr": "2"}, "rng": {"cpu": "3"}, "buffers": {}}


def after(step: int) -> Held:
    return {
        "grads": {"w": f"a{step}"}, "weights": {"w": f"b{step}"}, "rng": {"cpu": f"c{step}"},
        "optim": {"lr": "2", "w.m": f"d{step}"}, "buffers": {"mean": f"e{step}"},
    }  # fmt: skip


def text_of(names: dict[str, str]) -> str:
    return "".join(digest.rjust(32, "0") for digest in names.values())


def program_spec(**about: Any) -> ProgramSpec:
    return ProgramSpec(kind="script", target="/train.py", folder="/", **about)


def run_of(
    steps: list[Held],
    *,
    initial: Held | None = None,
    replica: int = 0,
    losses: list[int] | None = None,
    fingerprint: dict[str, Any] | None = None,
    events: dict[str, Any] | None = None,
    nonfinite: dict[int, dict[str, tuple[str, ...]]] | None = None,
    skipped: tuple[int, ...] = (),
    **about: Any,
) -> RunResult:
    """A run of one rank that recorded `steps`, read as its file is."""
    spec = RunSpec(
        config={"program": program_spec(**about).to_json(), "steps": len(steps), "taps": []},
        device="cpu", world_size=1, timeout_s=60.0, replica=replica,
    )  # fmt: skip
    states = [BEFORE if initial is None else initial, *steps]
    names = [
        NamesRecord(rank=0, step=at - 1, tensors={g: tuple(held[g]) for g in held})
        for at, held in enumerate(states)
    ]
    digests = [{group: text_of(held) for group, held in each.items()} for each in states]
    found = losses or [0x3F800000 + step for step in range(len(steps))]
    records = RankRecords(
        rank=0,
        start=StartRecord(
            schema=1, rank=0, world_size=1, pid=1, device="cpu", tensors={}, run=spec.key,
            environment={"fingerprint": fingerprint or {"torch": "2"}},
        ),
        initial=InitialRecord(rank=0, digests=digests[0], nonfinite={}),
        steps=tuple(
            StepRecord(
                step=step, rank=0, loss=FloatBits.from_bits(found[step]),
                microbatch_losses=(FloatBits.from_bits(found[step]),), grad_norm=None,
                digests=digests[step + 1], nonfinite=(nonfinite or {}).get(step, {}), step_s=0.1,
                live_bytes=1, peak_bytes=1, skipped="scaler" if step in skipped else "",
            )
            for step in range(len(steps))
        ),
        events=(EventRecord(name="environment", rank=0, step=-1, detail=events or {}),),
        error=None,
        end=EndRecord(rank=0, steps=len(steps), peak_bytes=1, startup_s=0.1, wall_s=1.0),
        problems=(),
    )  # fmt: skip
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, started_unix_s=0.0, wall_s=1.0,
        ranks=(RankExit(rank=0, code=0),),
    )  # fmt: skip
    return RunResult(spec=spec, outcome=outcome, ranks=(with_all_names(records, names),))


def verdict_of(reference: RunResult, candidate: RunResult, control: RunResult | None = None) -> Any:
    control = control or reference
    control = dataclasses.replace(
        control, spec=dataclasses.replace(reference.spec, replica=1),
    )  # fmt: skip
    key = control.spec.key
    (records,) = control.ranks
    assert records.start is not None
    control = dataclasses.replace(
        control,
        outcome=dataclasses.replace(control.outcome, key=key),
        ranks=(dataclasses.replace(records, start=dataclasses.replace(records.start, run=key)),),
    )
    case = CaseSpec(
        id="a", scenario="s", labels={}, reference=reference.spec, control=control.spec,
        candidate=candidate.spec, expect="bitwise", checks={"state": {}, "loss": {}, "finite": {}},
    )  # fmt: skip
    return judge(case, reference, control, candidate)


STEPS = [after(0), after(1)]
OTHER: dict[str, Any] = {"args": {"x": 1}}


def test_names_are_laid_over_all_steps() -> None:
    """A tensor that comes late is absent before; order is that of first appearance."""
    run = run_of(STEPS)
    assert find_flaw(run) is None
    (records,) = run.ranks
    assert records.start is not None
    assert records.initial is not None
    assert records.start.tensors["optim"] == ("lr", "w.m")
    assert records.initial.digests["optim"] == "2".rjust(32, "0") + ABSENT
    assert records.initial.digests["grads"] == ABSENT
    assert records.steps[1].digests["optim"] == text_of(STEPS[1]["optim"])


def test_a_digest_that_does_not_fit_its_names_is_a_problem() -> None:
    """A length that the names do not explain is never cut to fit."""
    run = run_of(STEPS)
    (records,) = run.ranks
    steps = (dataclasses.replace(records.steps[0], digests={"weights": "00"}), *records.steps[1:])
    names = [NamesRecord(rank=0, step=-1, tensors={"weights": ("w",)})]
    found = with_all_names(dataclasses.replace(records, steps=steps), names)
    assert any("2 characters" in problem for problem in found.problems)


def test_runs_are_aligned_in_the_order_of_the_first() -> None:
    """What one run has and the other has not is a difference at its step, under its name."""
    more = [after(0), after(1) | {"optim": {"late": "9", "lr": "2", "w.m": "d1"}}]
    reference, candidate = aligned(run_of(STEPS), run_of(more, **OTHER))
    (ours,), (theirs,) = reference.ranks, candidate.ranks
    assert ours.start is not None
    assert theirs.start is not None
    assert ours.start.tensors == theirs.start.tensors
    answer = exact.state(reference, candidate)
    assert answer.difference is not None
    found = answer.difference
    assert (found.step, found.quantity, found.tensor) == (1, "optim", "late")
    assert (found.reference, found.candidate) == ("missing", "9".rjust(32, "0"))


def test_a_tensor_that_is_there_earlier_in_one_run_differs_there() -> None:
    """State that a candidate has before step 0 and the reference makes in it."""
    early = BEFORE | {"optim": {"lr": "2", "w.m": "7"}}
    verdict = verdict_of(run_of(STEPS), run_of(STEPS, initial=early, **OTHER))
    assert verdict.outcome == "failed"
    assert (verdict.difference.step, verdict.difference.tensor) == (-1, "w.m")
    assert "before step 0" in verdict.message


def test_a_finding_on_graphs_fails_without_being_asked() -> None:
    """A gradient in a graph's static memory fails a program whose bits are equal."""
    run = run_of(STEPS, **OTHER)
    found = EventRecord(name="static_gradient", rank=0, step=1, detail={"parameter": "w"})
    (records,) = run.ranks
    records = dataclasses.replace(records, events=(*records.events, found))
    verdict = verdict_of(run_of(STEPS), dataclasses.replace(run, ranks=(records,)))
    assert (verdict.outcome, verdict.what) == ("failed", "static_buffer")
    assert verdict.difference.step == 1


def test_equal_runs_pass_whatever_the_order_of_names() -> None:
    """Two runs that name the same tensors in another order are equal."""
    turned = [{g: dict(reversed(list(h.items()))) for g, h in each.items()} for each in STEPS]
    assert verdict_of(run_of(STEPS), run_of(turned, **OTHER)).outcome == "passed"


def test_digests_of_absent_tensors_compare_nothing() -> None:
    """Two runs that name tensors and hold none of them are not equal."""
    nothing: Held = {"weights": {"w": ABSENT}}
    reference = run_of([nothing, nothing], initial=nothing)
    answer = exact.state(reference, run_of([nothing, nothing], initial=nothing, **OTHER))
    assert (answer.outcome, answer.what) == ("error", "not_run")


def test_other_initial_weights_are_told_as_such() -> None:
    """The first difference is before step 0, in a field and in words."""
    other = BEFORE | {"weights": {"w": "9"}}
    verdict = verdict_of(run_of(STEPS), run_of(STEPS, initial=other, **OTHER))
    assert (verdict.outcome, verdict.difference.step) == ("failed", -1)
    assert (verdict.difference.quantity, verdict.difference.tensor) == ("weights", "w")


def test_a_run_without_an_initial_state_is_not_judged() -> None:
    """A program's rank must have recorded its state before step 0."""
    run = run_of(STEPS)
    bare = dataclasses.replace(run.ranks[0], initial=None)
    flaw = flaw_of(dataclasses.replace(run, ranks=(bare,)))
    assert flaw.what == "corrupt_record"


def test_a_run_without_steps_says_what_to_do() -> None:
    """A program whose optimizer torch does not know is told of `record`."""
    run = run_of(STEPS)
    bare = dataclasses.replace(run.ranks[0], steps=(), initial=None, end=None)
    flaw = flaw_of(dataclasses.replace(run, ranks=(bare,)))
    assert flaw.what == "empty_run"
    assert "recorder.step()" in flaw.message


def test_an_optimizer_without_tensors_proves_itself_by_its_numbers() -> None:
    """Plain SGD keeps no tensor; its learning rate is enough."""
    steps = [each | {"optim": {"lr": "2"}} for each in STEPS]
    assert find_flaw(run_of(steps)) is None
    nothing: tuple[dict[str, str], ...] = ({}, {"w": ABSENT})
    for held in nothing:
        empty = flaw_of(run_of([each | {"grads": held} for each in STEPS]))
        assert empty.what == "empty_run"
        assert "grads" in empty.message


@pytest.mark.parametrize(
    ("group", "skipped", "in_reference", "outcome"),
    [
        ("buffers", False, True, "passed"),
        ("buffers", False, False, "failed"),
        ("weights", False, True, "failed"),
        ("grads", True, False, "passed"),
        ("grads", False, True, "failed"),
        ("weights", True, True, "failed"),
    ],
)
def test_what_excuses_a_value_that_is_not_finite(
    group: str, skipped: bool, in_reference: bool, outcome: str
) -> None:
    """A mask that both runs have, and gradients of a skipped step; nothing that is trained."""
    name = {"buffers": "mean"}.get(group, "w")
    bad: dict[int, dict[str, tuple[str, ...]]] = {1: {group: (name,)}}
    steps = (1,) if skipped else ()
    reference = run_of(STEPS, nonfinite=bad if in_reference else {}, skipped=steps)
    answer = exact.finite(reference, run_of(STEPS, nonfinite=bad, skipped=steps, **OTHER))
    assert answer.outcome == outcome
    if outcome == "failed":
        where = place_of(answer)
        assert (where.quantity, where.tensor) == (group, name)


@pytest.mark.parametrize("skipped", [False, True])
def test_no_skipped_step_excuses_an_infinite_loss(skipped: bool) -> None:
    """Losses are recorded before they are scaled: one that is infinite was so without a scaler."""
    losses, steps = [0x3F800000, 0x7F800000, 0x3F800000][: len(STEPS)], (1,) if skipped else ()
    run = run_of(STEPS, losses=losses, skipped=steps)
    answer = exact.finite(run, run)
    assert answer.outcome == "failed"
    where = place_of(answer)
    assert (where.quantity, where.step) == ("loss", 1)


def changed(step: int, group: str, name: str) -> list[Held]:
    return [
        held | {group: held[group] | {name: "99"}} if at == step else held
        for at, held in enumerate(STEPS)
    ]


CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"initial": BEFORE | {"rng": {"cpu": "9"}}, "steps": STEPS}, "seed"),
    "initialisation": ({"initial": BEFORE | {"rng": {"cpu": "9"}, "weights": {"w": "9"}},
                        "steps": STEPS}, "initialisation"),
    "loss": ({"steps": STEPS, "losses": [0x3F800009, 0x3F800001]}, "forward"),
    "gradient": ({"steps": changed(1, "grads", "w")}, "backward"),
    "weights": ({"steps": changed(1, "weights", "w")}, "update"),
    "optimizer": ({"steps": changed(0, "optim", "w.m")}, "update"),
    "draws": ({"steps": changed(0, "rng", "cpu")}, "draws"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_why_a_program_does_not_repeat_itself(name: str) -> None:
    """The likely cause follows from what differs first; no verdict on the candidate."""
    about, kind = CAUSES[name]
    reference, control = run_of(STEPS), run_of(**about)
    verdict = verdict_of(reference, run_of(STEPS, **OTHER), control)
    assert (verdict.outcome, verdict.what) == ("incomparable", "nondeterministic_reference")
    assert "determinism: enforce" in verdict.message
    ours, theirs = aligned(reference, control)
    cause = cause_of(ours, theirs, verdict.difference)
    assert cause.kind == kind
    assert str(cause) in verdict.message


def test_enforced_determinism_is_not_advised_again() -> None:
    """What is set already is no remedy."""
    about: dict[str, Any] = {"determinism": "enforce"}
    reference, control = run_of(STEPS, **about), run_of(changed(1, "grads", "w"), **about)
    verdict = verdict_of(reference, run_of(STEPS, **about, **OTHER), control)
    assert "enforced already" in verdict.message


@pytest.mark.parametrize(
    ("leaf", "about", "outcome"),
    [
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"env": {"NCCL_ALGO": "Ring"}}, "passed"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"env": {"OTHER": "1"}}, "incomparable"),
        ({"packages": {"x": "2"}}, {"packages": {"x": "2"}}, "passed"),
        ({"torch": "3", "cuda": "13"}, {"packages": {"torch": "3"}}, "passed"),
        ({"torch": "3"}, {"packages": {"x": "2"}}, "incomparable"),
        ({"environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}, {"determinism": "enforce"},
         "passed"),
        ({"environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}, {}, "incomparable"),
    ],
)  # fmt: skip
def test_only_what_a_scenario_states_may_differ(
    leaf: dict[str, Any], about: dict[str, Any], outcome: str
) -> None:
    """Variables, versions and determinism of the scenario differ by intent; nothing else may."""
    base: dict[str, Any] = {"torch": "2", "environment": {}, "packages": {}, "cuda": "12"}
    reference = run_of(STEPS, fingerprint=base)
    candidate = run_of(STEPS, fingerprint=base | leaf, **about)
    assert evidence.alike(reference, candidate, "candidate").outcome == outcome


def test_facts_of_the_device_count_though_they_come_late() -> None:
    """What a rank says once it has begun is compared; whether it is deterministic is not."""
    reference = run_of(STEPS, events={"device": "A", "deterministic": True})
    same = run_of(STEPS, events={"device": "A", "deterministic": False})
    other = run_of(STEPS, events={"device": "B", "deterministic": True})
    assert evidence.alike(reference, same, "candidate").outcome == "passed"
    answer = evidence.alike(reference, other, "candidate")
    assert answer.outcome == "incomparable"
    where = place_of(answer)
    assert where.quantity == "environment.device"
