"""The smallest differences between legs that still fail, for failures that are made up."""

import itertools
import math
from typing import Any

import pytest

from fsdp_core.config import FsdpConfig, OptimConfig
from harness.bisect.causes import FoundCauses, find_causes
from harness.bisect.differences import LegChanges
from harness.bisect.experiments import OutOfBudget
from harness.records import CaseSpec, PlantSpec, RunSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, Rule, case_of, run, verdict_of

ULP, NAN = PlantSpec(fault="ulp", step=3), PlantSpec(fault="nan", step=4)
U, N = "plant: ulp in step 3 on the last rank", "plant: nan in step 4 on the last rank"
ATTN, MLP, POISON = "graph: attn", "graph: mlp", "stress: poison"
LEDGER, POOL = "ledger: true -> false", "fsdp.pool: double -> traced"


def wide_case(**others: Any) -> CaseSpec:
    """Legs that differ in a dozen changes, which are all legal by themselves."""
    candidate = run(
        ULP, NAN, graph=("attn", "mlp"), stress=("jitter", "poison", "scramble", "races"),
        ledger=False, fsdp=FsdpConfig(pool="traced"), flush_every=2, stress_seed=7,
        optim=OptimConfig(lr=2e-3), **others,
    )  # fmt: skip
    return case_of(run(), candidate)


def search(rule: Rule, case: CaseSpec, **options: Any) -> tuple[FoundCauses, MadeUpAsker]:
    """What is found of a case whose candidates fail by a rule."""
    asker = MadeUpAsker(rule, **options)
    what = MadeUpAsker(rule).verdict(case).what
    return find_causes(case, verdict_of(case, what), asker), asker


def rule_of(causes: dict[tuple[str, ...], str]) -> Rule:
    """Fails as the first cause does whose changes are all there."""
    return lambda changes: next((w for c, w in causes.items() if set(c) <= changes), "")


@pytest.mark.parametrize(
    "sets",
    [((ATTN,),), ((U,), (N,)), ((U, POISON),), ((U, ATTN), (N,)), ((U, ATTN), (N, POISON)),
     ((POISON, LEDGER, MLP),), ((ATTN,), (MLP,), (POOL,))],
    ids=str,
)  # fmt: skip
def test_every_minimal_set_is_found_and_nothing_else(sets: tuple[tuple[str, ...], ...]) -> None:
    """Single changes, conjunctions and several of both, among a dozen."""
    found, _ = search(rule_of(dict.fromkeys(sets, "diverged")), wide_case())
    assert {frozenset(cause.changes) for cause in found.causes} == set(map(frozenset, sets))
    assert found.complete
    assert len(found.candidates) == 13


def test_a_single_cause_costs_its_bits_and_what_makes_it_sure() -> None:
    """Runs are log2 of the candidates, the repeats of the case, and those of the two passes."""
    found, asker = search(rule_of({(LEDGER,): "diverged"}), wide_case())
    repeats = 4
    for_confirmation = 2 * 8
    assert asker.num_runs <= math.ceil(math.log2(13)) + 3 + repeats + for_confirmation
    assert found.num_runs == asker.num_runs


def test_an_only_difference_is_asked_no_question() -> None:
    """Only whether the case fails every time; one that does not is searched as any other."""
    case = case_of(run(), run(graph=("attn",)))
    found, asker = search(rule_of({(ATTN,): "diverged"}), case)
    assert ([c.changes for c in found.causes], found.complete) == ([(ATTN,)], True)
    assert (asker.num_runs, found.num_questions) == (4, 0)
    found, _ = search(rule_of({(ATTN,): "diverged"}), case, chance=0.3)
    assert ([c.changes for c in found.causes], found.complete) == ([(ATTN,)], True)
    assert found.num_questions


def test_a_failure_that_hides_another_is_not_the_only_one_found() -> None:
    """NaN hides a divergence: the second cause is told with its own failure."""
    found, _ = search(rule_of({(N,): "nonfinite", (U,): "diverged"}), wide_case())
    assert [(c.changes, c.failure.what) for c in found.causes] == [
        ((N,), "nonfinite"), ((U,), "diverged"),
    ]  # fmt: skip
    assert found.complete


def test_another_failure_is_no_answer_to_the_search_for_the_first() -> None:
    """A set that hangs does not count as one that diverges, and is told."""
    found, _ = search(rule_of({(U, ATTN): "diverged", (POISON,): "hang"}), wide_case())
    assert {c.changes: c.failure.what for c in found.causes}[(POISON,)] == "hang"


def test_what_has_no_verdict_leaves_the_answer_open() -> None:
    """Changes that end without a verdict are neither searched nor taken for a pass."""
    found, _ = search(rule_of({(U,): "diverged", (ATTN,): "unsupported"}), wide_case())
    assert [cause.changes for cause in found.causes] == [(U,)]
    assert not found.complete
    assert any("error unsupported, which no cause explains" in note for note in found.notes)


def test_repeats_of_a_question_run_side_by_side() -> None:
    """With room for four, the repeats that learn the rate are one batch."""
    case = case_of(run(), run(graph=("attn",)))
    asker = MadeUpAsker(rule_of({(ATTN,): "diverged"}))
    asker.side_by_side = 4
    find_causes(case, verdict_of(case, "diverged"), asker)
    assert len(asker.ahead) == len(asker.asked) == 4
    assert {asked.id for asked in asker.asked} == asker.ahead


def test_one_lucky_pass_does_not_make_a_conjunction() -> None:
    """A set that passed once is asked again before the answer rests on it."""

    def lucky(case: CaseSpec) -> str:
        changes = set(LegChanges(case.reference, case.candidate).names)
        was_lucky = changes == {U} and case.candidate.replica == 0
        return "diverged" if U in changes and not was_lucky else ""

    case = wide_case()
    found = find_causes(case, verdict_of(case, "diverged"), MadeUpAsker(of_case=lucky))
    assert [cause.changes for cause in found.causes] == [(U,)]


def test_sets_that_rules_refuse_are_never_run() -> None:
    """What is asked is legal: no scope without the pool that it needs."""
    before = run(fsdp=FsdpConfig(pool="dynamic"))
    case = case_of(before, run(graph=("attn", "mlp"), stress=("poison",), ledger=False))
    found, asker = search(rule_of({(MLP,): "diverged"}), case)
    for asked in asker.asked:
        assert (
            not asked.candidate.config["graph"]
            or asked.candidate.config["fsdp"]["pool"] != "dynamic"
        )
    assert found.num_illegal
    (cause,) = found.causes
    assert set(cause.changes) == {MLP, "fsdp.pool: dynamic -> double"}
    assert cause.unproven == ("fsdp.pool: dynamic -> double",)


def test_what_a_budget_cuts_off_says_what_is_known() -> None:
    """The smallest set seen to fail comes along, and nothing is called complete."""
    with pytest.raises(OutOfBudget) as caught:
        search(rule_of({(U, ATTN): "diverged"}), wide_case(), max_runs=9)
    best = caught.value.best
    assert isinstance(best, FoundCauses)
    assert not best.complete
    assert any("budget of 9 runs" in note for note in best.notes)


def test_a_case_that_does_not_fail_again_is_not_searched() -> None:
    """A failure of one run in a thousand gives no cause, and says why."""
    case = wide_case()
    asker = MadeUpAsker(lambda changes: "")
    found = find_causes(case, verdict_of(case, "diverged"), asker)
    assert found.causes == ()
    assert not found.complete
    assert "too seldom" in found.notes[0]


def test_a_nondeterministic_reference_blames_no_difference() -> None:
    """The legs cannot explain what the reference does by itself."""
    case = wide_case()
    verdict = verdict_of(case, "nondeterministic_reference")
    found = find_causes(case, verdict, MadeUpAsker(lambda changes: ""))
    assert found.causes == ()
    assert "second run" in found.notes[0]


def test_equal_legs_have_no_cause() -> None:
    """A second run of the reference that failed is no matter of configuration."""
    spec = run()
    case = case_of(spec, RunSpec.from_json(spec.to_json() | {"replica": 5}))
    found = find_causes(case, verdict_of(case, "diverged"), MadeUpAsker(lambda changes: ""))
    assert found.notes == ("nothing to search: the legs do not differ",)


@pytest.mark.parametrize("cause", [(U,), (ATTN, POISON)])
def test_a_fault_of_three_runs_in_ten_is_found_for_every_seed(cause: tuple[str, ...]) -> None:
    """Four searches of a flaky fault name its cause; at 99 % one in a hundred may not."""
    for seed in range(4):
        found, _ = search(rule_of({cause: "diverged"}), wide_case(), chance=0.3, seed=seed)
        assert [set(c.changes) for c in found.causes] == [set(cause)], (seed, found.notes)
        assert found.complete
        assert found.patience is not None
        assert not found.patience.always


def test_every_pair_of_changes_is_found_as_a_conjunction() -> None:
    """No pair is special: each of these 21 is found as one cause of two changes."""
    case = wide_case()
    names = search(rule_of({(U,): "diverged"}), case)[0].candidates
    for pair in itertools.combinations(names[::2], 2):
        found, _ = search(rule_of({pair: "diverged"}), case)
        assert [cause.changes for cause in found.causes] == [pair]
