"""Runs of programs that the harness did not write: names that change, causes, what may differ."""

from dataclasses import replace
from typing import Any

import pytest

from harness.checks import judge
from harness.checks.complete import find_flaw
from harness.checks.evidence import alike
from harness.checks.judge import cause_of
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
from harness.store.streams import aligned, with_all_names
from tests.unit.harness.checks.conftest import edit_outcome, edit_rank, flaw_of, place, said

Held = dict[str, dict[str, str]]
"""Group to name to a digest in short."""
BEFORE: Held = {"weights": {"w": "1"}, "optim": {"lr": "2"}, "rng": {"cpu": "3"}, "buffers": {}}
OTHER: dict[str, Any] = {"args": {"x": 1}}
"""Of a candidate."""


def after(step: int) -> Held:
    return {
        "grads": {"w": f"a{step}"}, "weights": {"w": f"b{step}"}, "rng": {"cpu": f"c{step}"},
        "optim": {"lr": "2", "w.m": f"d{step}"}, "buffers": {"mean": f"e{step}"},
    }  # fmt: skip


STEPS = [after(0), after(1)]


def text_of(names: dict[str, str]) -> str:
    return "".join(digest.rjust(32, "0") for digest in names.values())


def run_of(
    steps: list[Held] = STEPS, initial: Held = BEFORE, losses: tuple[int, ...] = (0x3F800000,) * 2,
    fingerprint: dict[str, Any] | None = None, events: dict[str, Any] | None = None, **about: Any,
) -> RunResult:  # fmt: skip
    """A run of one rank that recorded `steps`, read as its file is."""
    program = ProgramSpec(kind="script", target="/train.py", folder="/", **about)
    config = {"program": program.to_json(), "steps": len(steps), "taps": []}
    spec = RunSpec(config=config, device="cpu", world_size=1, timeout_s=60.0)
    states = [initial, *steps]
    names = [
        NamesRecord(rank=0, step=at - 1, tensors={g: tuple(held[g]) for g in held})
        for at, held in enumerate(states)
    ]
    digests = [{group: text_of(held) for group, held in each.items()} for each in states]
    records = RankRecords(
        rank=0, error=None, problems=(),
        start=StartRecord(
            schema=1, rank=0, world_size=1, pid=1, device="cpu", tensors={},
            environment={"fingerprint": fingerprint or {"torch": "2"}},
        ),
        initial=InitialRecord(rank=0, digests=digests[0], nonfinite={}),
        steps=tuple(
            StepRecord(
                step=step, rank=0, loss=FloatBits.from_bits(losses[step]), grad_norm=None,
                microbatch_losses=(FloatBits.from_bits(losses[step]),), nonfinite={},
                digests=digests[step + 1], step_s=0.1, live_bytes=1, peak_bytes=1,
            )
            for step in range(len(steps))
        ),
        events=(EventRecord(name="environment", rank=0, step=-1, detail=events or {}),),
        end=EndRecord(rank=0, steps=len(steps), peak_bytes=1, startup_s=0.1, wall_s=1.0),
    )  # fmt: skip
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, started_unix_s=0.0, wall_s=1.0,
        ranks=(RankExit(rank=0, code=0),),
    )  # fmt: skip
    return RunResult(spec=spec, outcome=outcome, ranks=(with_all_names(records, names),))


REFERENCE = run_of()


def verdict_of(candidate: RunResult, control: RunResult = REFERENCE, **about: Any) -> Any:
    reference = run_of(**about) if about else REFERENCE
    spec = replace(reference.spec, replica=1)
    control = edit_outcome(replace(control, spec=spec), key=spec.key)
    case = CaseSpec(
        id="a", scenario="s", labels={}, reference=reference.spec, control=spec, expect="bitwise",
        candidate=candidate.spec, checks={"state": {}, "loss": {}, "finite": {}},
    )  # fmt: skip
    return judge(case, reference, control, candidate)


def changed(step: int, group: str, name: str) -> list[Held]:
    return [
        held | {group: held[group] | {name: "99"}} if at == step else held
        for at, held in enumerate(STEPS)
    ]


def test_names_are_laid_over_all_steps() -> None:
    """A tensor that comes late is absent before; order is that of first appearance."""
    assert find_flaw(REFERENCE) is None
    (records,) = REFERENCE.ranks
    assert records.start is not None
    assert records.initial is not None
    assert records.start.tensors["optim"] == ("lr", "w.m")
    assert records.initial.digests["optim"] == "2".rjust(32, "0") + ABSENT
    assert records.steps[1].digests["optim"] == text_of(STEPS[1]["optim"])
    steps = (replace(records.steps[0], digests={"weights": "00"}), *records.steps[1:])
    names = [NamesRecord(rank=0, step=-1, tensors={"weights": ("w",)})]
    found = with_all_names(replace(records, steps=steps), names)
    assert any("2 characters" in problem for problem in found.problems)


LATE = [after(0), after(1) | {"optim": {"late": "9", "lr": "2", "w.m": "d1"}}]
TURNED = [{g: dict(reversed(list(h.items()))) for g, h in each.items()} for each in STEPS]


@pytest.mark.parametrize(
    ("candidate", "where"),
    [
        (run_of(TURNED, **OTHER), None),  # names in another order
        (run_of(LATE, **OTHER), (1, 0, "optim", "late")),
        (run_of(initial=BEFORE | {"optim": {"lr": "2", "w.m": "7"}}, **OTHER),
         (-1, 0, "optim", "w.m")),
        (run_of(initial=BEFORE | {"weights": {"w": "9"}}, **OTHER), (-1, 0, "weights", "w")),
        (run_of(changed(1, "buffers", "mean"), **OTHER), (1, 0, "buffers", "mean")),
    ],
)  # fmt: skip
def test_what_one_run_has_and_the_other_has_not_differs_there(candidate: Any, where: Any) -> None:
    """At its step, under its name, before step 0 as well."""
    verdict = verdict_of(candidate)
    assert verdict.outcome == ("failed" if where else "passed"), verdict.message
    assert where is None or place(verdict) == where


@pytest.mark.parametrize(
    ("run", "what", "told"),
    [
        (edit_rank(REFERENCE, 0, initial=None), "corrupt_record", "before step 0"),
        (edit_rank(REFERENCE, 0, steps=(), initial=None, end=None), "empty_run",
         "recorder.step()"),
        *((run_of([each | {"grads": held} for each in STEPS]), "empty_run", "grads")
          for held in ({}, {"w": ABSENT})),
    ],
)  # fmt: skip
def test_a_program_that_is_not_whole(run: RunResult, what: str, told: str) -> None:
    """It says what to do; absent tensors prove nothing."""
    flaw = flaw_of(run)
    assert flaw.what == what
    assert told in flaw.message


def test_an_optimizer_without_tensors_proves_itself_by_its_numbers() -> None:
    """Plain SGD keeps no tensor; its learning rate is enough."""
    assert find_flaw(run_of([each | {"optim": {"lr": "2"}} for each in STEPS])) is None


def test_a_finding_on_graphs_fails_without_being_asked() -> None:
    """A gradient in a graph's static memory fails a program whose bits are equal."""
    found = EventRecord(name="static_gradient", rank=0, step=1, detail={"parameter": "w"})
    verdict = verdict_of(edit_rank(run_of(**OTHER), 0, events=(found,)))
    assert said(verdict) == ("failed", "static_buffer")
    assert place(verdict)[0] == 1


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"initial": BEFORE | {"rng": {"cpu": "9"}}}, "seed"),
        ({"initial": BEFORE | {"rng": {"cpu": "9"}, "weights": {"w": "9"}}}, "initialisation"),
        ({"losses": (0x3F800009, 0x3F800000)}, "forward"),
        ({"steps": changed(1, "grads", "w")}, "backward"),
        ({"steps": changed(1, "weights", "w")}, "update"),
        ({"steps": changed(0, "optim", "w.m")}, "update"),
        ({"steps": changed(0, "rng", "cpu")}, "draws"),
    ],
)
def test_why_a_program_does_not_repeat_itself(about: dict[str, Any], kind: str) -> None:
    """The likely cause follows from what differs first; no verdict on the candidate."""
    control = run_of(**about)
    verdict = verdict_of(run_of(**OTHER), control)
    assert said(verdict) == ("incomparable", "nondeterministic_reference")
    ours, again = aligned(REFERENCE, control)
    cause = cause_of(ours, again, verdict.difference)
    assert cause.kind == kind
    assert str(cause) in verdict.message
    assert "determinism: enforce" in verdict.message
    enforced: dict[str, Any] = {"determinism": "enforce"}
    verdict = verdict_of(run_of(**enforced, **OTHER), run_of(**about, **enforced), **enforced)
    assert "enforced already" in verdict.message


@pytest.mark.parametrize(
    ("leaf", "about", "outcome"),
    [
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"env": {"NCCL_ALGO": "Ring"}}, "passed"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, {"env": {"OTHER": "1"}}, "incomparable"),
        ({"threads": 2, "environment": {"OMP_NUM_THREADS": "2"}},
         {"env": {"OMP_NUM_THREADS": "2"}}, "passed"),
        ({"packages": {"x": "2"}}, {"packages": {"x": "2"}}, "passed"),
        ({"torch": "3", "cuda": "13"}, {"packages": {"torch": "3"}}, "passed"),
        ({"torch": "3"}, {"packages": {"x": "2"}}, "incomparable"),
        ({"environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}, {"determinism": "enforce"},
         "passed"),
        ({"environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}, {}, "incomparable"),
    ],
)  # fmt: skip
def test_only_what_a_scenario_states_may_differ(leaf: Any, about: Any, outcome: str) -> None:
    """Variables, versions and determinism of the scenario differ by intent; nothing else may."""
    base: dict[str, Any] = {
        "torch": "2", "environment": {}, "packages": {}, "cuda": "12", "threads": 1
    }  # fmt: skip
    candidate = run_of(fingerprint=base | leaf, **about)
    assert alike(run_of(fingerprint=base), candidate, "candidate").outcome == outcome


def test_facts_of_the_device_count_though_they_come_late() -> None:
    """What a rank says once it has begun is compared; whether it is deterministic is not."""
    reference = run_of(events={"device": "A", "deterministic": True})
    for device, is_same in (("A", True), ("B", False)):
        other = run_of(events={"device": device, "deterministic": False})
        answer = alike(reference, other, "candidate")
        assert (answer.outcome == "passed") == is_same
        assert is_same or place(answer)[2] == "environment.device"
