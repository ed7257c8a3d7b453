"""What differs between two runs: settings, faults and environments."""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig, model_from_preset
from harness.bisect.differences import (
    RunChanges,
    between_environments,
    why_illegal,
    with_steps,
)
from harness.bisect.locate import between, locate
from harness.records import (
    ABSENT,
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    PlantSpec,
    RunResult,
    RunSpec,
    StepRecord,
    each_of,
)
from tests.support.run_records import edit
from tests.unit.harness.bisect.made_up_asker import program_run, run
from tests.unit.harness.bisect.small_model import (
    ROWS,
    WEIGHTS,
    both,
    calls_from,
    case_of,
    digests,
    edited,
    fields_of,
    floats,
    foreign,
    of_rank,
    run_of,
    tapped,
)

ULP, NAN = PlantSpec(fault="ulp", step=3), PlantSpec(fault="nan", step=4, rank=0)


PLAIN = program_run(args={"steps": 8, "model.dim": 4, "old": "1e-3"}, env={"A": "1"})
OTHER = program_run(
    args={"steps": 8, "model.dim": 8, "new": True}, env={"B": "2"}, packages={"toy": "1.10"},
    determinism="enforce",
)  # fmt: skip
PLUS = PlantSpec(fault="positive_zero", step=2, legs=("reference",))
MINUS = PlantSpec(fault="negative_zero", step=2)


@pytest.mark.parametrize(
    ("reference", "candidate", "names"),
    [
        (run(seed=1, stress=("races",)),
         run(ULP, seed=2, stress=("jitter", "poison"), graph=("mlp", "attn"), ledger=False),
         {"graph: attn", "graph: mlp", "seed: 1 -> 2", "ledger: true -> false", "stress: jitter",
          "stress: poison", "stress: no races", "plant: ulp in step 3 on the last rank"}),
        (run(), run(parallel=ParallelConfig(tp=2)), {"parallel.dp: 2 -> 1", "parallel.tp: 1 -> 2"}),
        # A fault with its counterpart is one change; one of both runs is none.
        (run(PLUS), run(MINUS, graph=("attn",)),
         {"graph: attn", "plant: negative_zero in step 2 on the last rank"}),
        (run(ULP), run(ULP, seed=2), {"seed: 1234 -> 2"}),
        (run(), run(ULP, NAN),
         {"plant: ulp in step 3 on the last rank", "plant: nan in step 4 on rank 0"}),
        # Options that one run alone has are changes, too.
        (PLAIN, OTHER,
         {"args.model.dim: 4 -> 8", "args.new: none -> true", "args.old: 1e-3 -> none",
          "env.A: 1 -> none", "env.B: none -> 2", "packages.toy: none -> 1.10",
          "determinism:  -> enforce"}),
    ],
    ids=["lists", "layout", "counterpart", "shared plant", "two plants", "program"],
)  # fmt: skip
def test_each_change_goes_alone_and_all_of_them_are_the_candidate(
    reference: RunSpec, candidate: RunSpec, names: set[str]
) -> None:
    """The ends of a search are the runs of the case: not even their keys differ."""
    found = RunChanges(reference, candidate)
    assert set(found.names) == names
    assert found.run_with(found.names).key == candidate.key
    assert found.run_with(()).key == reference.key
    most = max(len(each_of(reference.plant)), len(each_of(candidate.plant)))
    for subset in itertools.combinations(found.names, 2):
        made = found.run_with(subset)
        assert set(RunChanges(reference, made).names) == set(subset)
        assert len(each_of(made.plant)) <= most


EXPERTS = model_from_preset("moe_tiny", {})
CAPTURE = PlantSpec(fault="capture_raise")
(CAPTURE_NAME,) = RunChanges(run(), run(CAPTURE)).names


@pytest.mark.parametrize(
    ("candidate", "names", "told"),
    [
        (run(model=EXPERTS, graph=("moe_router", "moe_preprocess")), ["graph: moe_preprocess"],
         "preprocess_follows_router"),
        (run(CAPTURE, graph=("attn",)), [CAPTURE_NAME], "a graph scope that capture_raise"),
        (run(parallel=ParallelConfig(tp=2)), ["parallel.tp: 1 -> 2"], "4 ranks against 2"),
        # Steps, microbatches, ranks and compiled parts are those of the reference.
        (run(steps=8), ["steps: 6 -> 8"], "steps 8 against 6"),
        (run(microbatches=2), ["microbatches: 1 -> 2"], "microbatches 2 against 1"),
        (run(compile=("mlp",)), ["compile: mlp"], "compile [mlp] against []"),
    ],
)  # fmt: skip
def test_changes_that_cannot_be_run_or_compared(candidate: RunSpec, names: Any, told: str) -> None:
    """The rule is named, and no run is made."""
    is_of_experts = candidate.config["model"]["experts"]
    found = RunChanges(run(**({"model": EXPERTS} if is_of_experts else {})), candidate)
    assert told in found.why_illegal(names)
    assert found.why_illegal(found.names) in ("", found.why_illegal(names))


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (PlantSpec(fault="norm_sum_missing", step=1), "layout with tp 2 or more and sequence_"),
        (PlantSpec(fault="ulp", step=9), "step 9 of 6"),
        (PlantSpec(fault="ulp", step=1, rank=2), "rank 2 of 2"),
        (PlantSpec(fault="illegal_access", step=1), "runs on cuda"),
        (ULP, ""),
    ],
)  # fmt: skip
def test_a_fault_is_refused_where_it_cannot_be_planted(plant: PlantSpec, told: str) -> None:
    """Without its layout, past the steps or ranks, on another device."""
    refused = why_illegal(run(plant))
    assert told in refused
    assert bool(refused) == bool(told)


def test_steps_change_with_the_option_that_states_them_and_limits_stay() -> None:
    """A program that declares no such option keeps its steps; limits are the candidate's."""
    shorter = with_steps(PLAIN, 4).config
    assert (shorter["steps"], shorter["program"]["args"]["steps"]) == (4, 6)
    assert with_steps(program_run(smaller={}), 4) == program_run(smaller={})
    assert with_steps(run(), 4).config["steps"] == 4
    candidate = replace(run(graph=("attn",)), timeout_s=5.0)
    assert RunChanges(run(), candidate).run_with(()).timeout_s == 5.0


# --- environments

KNOWN: dict[str, Any] = {
    "torch": "2.12", "data": "d1", "cpu_capability": "AVX2", "environment": {"NCCL_ALGO": "Ring"},
}  # fmt: skip


def in_environment(*known: dict[str, Any]) -> RunResult:
    """A run whose ranks recorded these."""
    made = run_of()
    for rank, each in enumerate(known):
        made = of_rank(made, rank, environment={"fingerprint": each})
    return made


@pytest.mark.parametrize(
    ("other", "facts"),
    [
        ((KNOWN, KNOWN), ()),
        ((KNOWN | {"torch": "2.13"},) * 2, ("torch 2.12 became 2.13",)),
        ((KNOWN | {"environment": {}},) * 2, ("environment.NCCL_ALGO Ring became absent",)),
        ((KNOWN, KNOWN | {"cpu_capability": "SSE"}),
         ("rank 1: cpu_capability AVX2 became SSE",)),
    ],
)  # fmt: skip
def test_a_fact_of_all_ranks_is_said_once_and_one_of_some_by_rank(other: Any, facts: Any) -> None:
    """One rank on another machine is seen."""
    assert between_environments(in_environment(KNOWN, KNOWN), in_environment(*other)) == facts


# --- where gradients went wrong, in programs that clip them ---------------------------------------


NORM = "layers.0.attn.norm.weight"


def clipping(wrong: Sequence[Collection[str]]) -> RunResult:
    """A program's run that clips, with wrong gradients on each rank before, and all wrong after."""
    names = {name: f"{name}:unclipped[0]" for name in WEIGHTS}
    rows = {row: f"{at:032x}{at:08x}" for at, row in enumerate(names.values())}
    run = foreign(tapped(run_of(), 1, rows))
    for step in run.ranks[0].steps:  # whose weights both ranks hold, as in DDP
        run = edit(run, 1, step.step, digests={"weights": step.digests["weights"]})
    for rank, held in enumerate(wrong):
        other = {names[name]: f"{rank + 1:032x}{'f' * 7}0" for name in held}
        taps = "".join((rows | other).values())
        run = edited(run, {rank: both(digests(grads=WEIGHTS), floats(taps=taps))})
    return run


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (((NORM,), (NORM,)), ("reduce", NORM)),
        (((NORM, "head.weight"), ()), ("reduce", "head.weight")),
        (((), ()), ("optimizer", WEIGHTS[0])),
    ],
)
def test_before_clipping_the_gradient_that_is_wrong_is_alone(wrong: Any, expected: Any) -> None:
    """What ranks have of a tensor whose weights are one was not reduced; or clipping did it."""
    plain = clipping([])
    found = between(plain, clipping(wrong))
    assert (found.step, found.quantity) == (2, "grads")
    assert (found.phase, found.tensor) == expected
    same = clipping([])
    for rank in (0, 1):
        taps = plain.ranks[0].steps[2].taps.replace(f"{2:032x}", "e" * DIGEST_HEX_CHARS)
        same = edited(same, {rank: both(digests(grads=WEIGHTS), floats(taps=taps))})
    found = between(plain, same)
    assert (found.phase, found.tensor, found.rank_is_hidden) == ("backward", WEIGHTS[2], True)


def test_a_gradient_that_one_run_alone_clips_is_the_wrong_one() -> None:
    """As of a parameter that was frozen: all others differ by the norm only."""
    plain, frozen = clipping([]), clipping([(), ()])
    for rank in (0, 1):
        rows = plain.ranks[rank].steps[2].taps
        held = f"{2:032x}{2:08x}"
        assert held in rows
        taps = rows.replace(held, "0" * DIGEST_HEX_CHARS + NEVER_RAN)
        frozen = edited(frozen, {rank: floats(taps=taps)})
    found = between(plain, frozen)
    assert (found.phase, found.tensor) == ("backward", WEIGHTS[2])
    assert any("in one run alone" in told for told in found.evidence)


def test_a_norm_of_one_run_alone_is_a_clipping() -> None:
    """Without calls that were looked into it is known by the norm."""
    edit = both(digests(grads=WEIGHTS), floats(grad_norm=None))
    found = between(foreign(run_of(taps=False)), foreign(edited(run_of(taps=False), {0: edit})))
    assert (found.phase, found.quantity) == ("optimizer", "grads")


@pytest.mark.parametrize("reversed_", [False, True])
def test_a_step_that_one_run_left_out_is_named(reversed_: bool) -> None:
    """Not gradients that it has none of, nor a reduction: GradScaler skipped it on one rank."""
    why = "GradScaler found a gradient that is not finite"
    none = {"grads": ABSENT * len(WEIGHTS)}

    def left_out(record: StepRecord) -> StepRecord:
        return dataclasses.replace(record, skipped=why, digests={**record.digests, **none})

    plain = foreign(run_of())
    runs = plain, edited(plain, {1: left_out})
    found = between(*(runs[::-1] if reversed_ else runs))
    assert (found.step, found.phase, found.ranks) == (2, "optimizer", (1,))
    assert (found.quantity, found.tensor) == ("skipped", "")
    whose = "reference" if reversed_ else "candidate"
    told = f"only the {whose} skipped its optimizer step on rank 1: {why}"
    assert told in found.evidence


@pytest.mark.parametrize(
    ("first", "phase", "module"),
    [
        ("(root):input[0]", "input", "(root)"), ("a:input[0]", "forward", "(root)"),
        ("b:input[0]", "forward", "(root)"), ("b:output[0]", "forward", "b"),
        ("(root):gradient[0]", "backward", "(root)"), ("a:gradient[0]", "backward", "(root)"),
    ],
)  # fmt: skip
def test_the_outermost_module_works_between_its_parts(first: str, phase: str, module: str) -> None:
    """What a part is given is not given to the model; its gradient comes from no loss."""
    names = [f"{of}:{kind}[0]" for of, kind in (
        ("(root)", "input"), ("a", "input"), ("a", "output"), ("b", "input"), ("b", "output"),
        ("(root)", "output"), ("(root)", "gradient"), ("b", "gradient"), ("a", "gradient"),
    )]  # fmt: skip

    def leg(bad: int) -> RunResult:
        digest = {n: at + 100 * (at >= bad) for at, n in enumerate(names)}
        return tapped(run_of(), 1, {n: f"{digest[n]:032x}{at:08x}" for at, n in enumerate(names)})

    found = between(leg(len(names)), leg(names.index(first)))
    assert (found.phase, found.module) == (phase, module)


def test_taps_of_one_run_alone_are_left_out() -> None:
    """A run that fuses modules calls none of them; what both runs call tells the place."""
    tap, candidate = "layers.0.attn.attention:output", run_of(graph=("attn",))
    candidate = edited(candidate, dict.fromkeys((0, 1), calls_from(tap)))
    kept = [index for index, (name, _) in enumerate(ROWS) if ".wq:" not in name]

    def fused(record: StepRecord) -> StepRecord:
        rows = (record.taps[i * TAP_HEX_CHARS : (i + 1) * TAP_HEX_CHARS] for i in kept)
        return dataclasses.replace(record, taps="".join(rows))

    for rank, own in enumerate(candidate.ranks):
        assert own.start is not None
        names, steps = tuple(own.start.taps[i] for i in kept), tuple(map(fused, own.steps))
        candidate = of_rank(candidate, rank, taps=names, steps=steps)
    found = between(run_of(), candidate)
    assert (found.step, found.phase, found.tensor) == (2, "forward", tap)


def test_another_environment_comes_before_any_difference() -> None:
    """What differs is named, on which rank, and of which run, whatever the records show."""

    def moved(run: RunResult) -> RunResult:
        return of_rank(run, 1, environment={"fingerprint": {"torch": "y", "threads": 1}})

    candidate = moved(run_of(graph=("attn",)))
    found = locate(case_of(candidate))
    expected: dict[str, Any] = {
        "phase": "outside", "rank": 1, "quantity": "environment.torch", "module": "",
    }  # fmt: skip
    assert fields_of(found, expected) == expected
    assert "the candidate ran in another environment" in found.evidence[0]
    assert found.evidence[1] == "torch: 2.12 became y"
    wrong = edited(candidate, {0: calls_from("norm:output")})
    found = locate(case_of(wrong))
    assert fields_of(found, expected) == expected
    assert "part (step 2, forward, microbatch 0, norm" in found.evidence[-1]
    found = locate(case_of(wrong, moved(run_of(replica=1))))
    assert "the control ran in another environment" in found.evidence[0]


def test_weights_of_a_program_may_be_written_between_steps() -> None:
    """It has them as they are, and no copy: a rollback, say, that one run alone makes."""
    told = [
        " ".join(
            between(
                leg(run_of()),
                leg(edited(run_of(), {1: calls_from("layers.0.attn.attention.wq:output")})),
            ).evidence
        )
        for leg in (lambda run: run, foreign)
    ]
    assert ["they were written after that step" in each for each in told] == [False, True]
    assert ["a copy of them" in each for each in told] == [True, False]
