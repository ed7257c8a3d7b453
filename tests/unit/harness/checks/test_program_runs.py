"""Runs of programs that the harness did not write: names that change, causes, environments."""

import dataclasses
from typing import Any

import pytest

from harness.checks import environment, exact
from harness.checks.complete import find_flaw
from harness.checks.environment import cause_of
from harness.checks.judge import judge
from harness.naming import aligned, with_all_names
from harness.program.spec import ProgramSpec
from harness.records import (
    ABSENT,
    CaseSpec,
    EndRecord,
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
)

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
    flaw = find_flaw(dataclasses.replace(run, ranks=(bare,)))
    assert flaw is not None
    assert flaw.what == "corrupt_record"


def test_a_run_without_steps_says_what_to_do() -> None:
    """A program whose optimizer torch does not know is told of `record`."""
    run = run_of(STEPS)
    bare = dataclasses.replace(run.ranks[0], steps=(), initial=None, end=None)
    flaw = find_flaw(dataclasses.replace(run, ranks=(bare,)))
    assert flaw is not None
    assert flaw.what == "empty_run"
    assert "recorder.step()" in flaw.message


def test_an_optimizer_without_tensors_proves_itself_by_its_numbers() -> None:
    """Plain SGD keeps no tensor; its learning rate is enough."""
    steps = [each | {"optim": {"lr": "2"}} for each in STEPS]
    assert find_flaw(run_of(steps)) is None
    nothing: tuple[dict[str, str], ...] = ({}, {"w": ABSENT})
    for held in nothing:
        empty = find_flaw(run_of([each | {"grads": held} for each in STEPS]))
        assert empty is not None
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
        assert answer.difference is not None
        assert (answer.difference.quantity, answer.difference.tensor) == (group, name)


@pytest.mark.parametrize("skipped", [False, True])
def test_no_skipped_step_excuses_an_infinite_loss(skipped: bool) -> None:
    """Losses are recorded before they are scaled: one that is infinite was so without a scaler."""
    losses, steps = [0x3F800000, 0x7F800000, 0x3F800000][: len(STEPS)], (1,) if skipped else ()
    run = run_of(STEPS, losses=losses, skipped=steps)
    answer = exact.finite(run, run)
    assert answer.outcome == "failed"
    assert answer.difference is not None
    assert (answer.difference.quantity, answer.difference.step) == ("loss", 1)


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
    assert environment.alike(reference, candidate, "candidate").outcome == outcome


def test_facts_of_the_device_count_though_they_come_late() -> None:
    """What a rank says once it has begun is compared; whether it is deterministic is not."""
    reference = run_of(STEPS, events={"device": "A", "deterministic": True})
    same = run_of(STEPS, events={"device": "A", "deterministic": False})
    other = run_of(STEPS, events={"device": "B", "deterministic": True})
    assert environment.alike(reference, same, "candidate").outcome == "passed"
    answer = environment.alike(reference, other, "candidate")
    assert answer.outcome == "incomparable"
    assert answer.difference is not None
    assert answer.difference.quantity == "environment.device"
