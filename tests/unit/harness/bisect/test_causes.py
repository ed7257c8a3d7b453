"""From a failing case to its causes, its least case and a scenario that fails alone: made-up runs.

What is asked is answered by a rule about a case (`MadeUpAsker`), so every rule there may be is
tried: single changes, conjunctions, failures that hide others, chance.
"""

import itertools
import math
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_core.config import FsdpConfig, OptimConfig, ParallelConfig, model_from_preset
from harness.bisect.causes import FoundCauses, LeastCase, find_causes, find_least, first_failing
from harness.bisect.differences import LegChanges
from harness.bisect.experiments import Failure, Judged, OutOfBudget, failure_of
from harness.bisect.repro import Repro, find_repro, leave_alone, read_back, scenarios, write_repro
from harness.records import CaseSpec, PlantSpec, RunSpec
from tests.unit.harness.bisect.made_up_asker import MadeUpAsker, Rule, case_of, run, verdict_of

ULP, NAN = PlantSpec(fault="ulp", step=3), PlantSpec(fault="nan", step=4)
U, N = "plant: ulp in step 3 on the last rank", "plant: nan in step 4 on the last rank"
ATTN, MLP, POISON = "graph: attn", "graph: mlp", "stress: poison"
LEDGER, POOL = "ledger: true -> false", "fsdp.pool: double -> traced"
DIVERGED = Failure(outcome="failed", what="diverged")


def wide_case() -> CaseSpec:
    """Runs that differ in a dozen changes, which are all legal by themselves."""
    candidate = run(
        ULP, NAN, graph=("attn", "mlp"), stress=("jitter", "poison", "scramble", "races"),
        ledger=False, fsdp=FsdpConfig(pool="traced"), flush_every=2, stress_seed=7,
        optim=OptimConfig(lr=2e-3),
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


def sets_of(found: FoundCauses) -> list[set[str]]:
    return [set(cause.changes) for cause in found.causes]


# --- causes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [((ATTN,),), ((U,), (N,)), ((U, POISON),), ((U, ATTN), (N,)), ((U, ATTN), (N, POISON)),
     ((U, ATTN), (U, MLP)), ((POISON, LEDGER, MLP),), ((ATTN,), (MLP,), (POOL,))],
    ids=str,
)  # fmt: skip
def test_every_minimal_set_is_found_and_nothing_else(sets: tuple[tuple[str, ...], ...]) -> None:
    """Single changes, conjunctions, such as share a change, and several of them, among a dozen."""
    found, _ = search(rule_of(dict.fromkeys(sets, "diverged")), wide_case())
    assert set(map(frozenset, sets_of(found))) == set(map(frozenset, sets))
    assert (found.complete, len(found.candidates)) == (True, 13)


@pytest.mark.parametrize("seed", range(20))
def test_causes_drawn_at_random_are_all_found(seed: int) -> None:
    """Exactly the minimal ones, in whatever number and size."""
    drawn, case = random.Random(seed), wide_case()
    names = LegChanges(case.reference, case.candidate).names
    drawn_sets = [frozenset(drawn.sample(names, drawn.randint(1, 3))) for _ in range(3)]
    minimal = {s for s in drawn_sets if not any(other < s for other in drawn_sets)}
    found, _ = search(lambda c: "diverged" if any(s <= c for s in minimal) else "", case)
    assert (set(map(frozenset, sets_of(found))), found.complete) == (minimal, True)


def test_a_single_cause_costs_its_bits_and_what_makes_it_sure() -> None:
    """Runs are log2 of the candidates, the repeats of the case, and those of one pass."""
    found, asker = search(rule_of({(LEDGER,): "diverged"}), wide_case())
    assert asker.num_runs <= math.ceil(math.log2(13)) + 4 + 9
    assert found.num_runs == asker.num_runs


def test_an_only_difference_is_asked_no_question() -> None:
    """Only whether the case fails every time; one that does not is searched as any other."""
    case = case_of(run(), run(graph=("attn",)))
    for chance, questions in ((1.0, 0), (0.3, 1)):
        found, asker = search(rule_of({(ATTN,): "diverged"}), case, chance=chance)
        assert (sets_of(found), found.complete) == ([{ATTN}], True)
        assert found.num_questions == questions
        assert asker.num_runs == 4 or chance < 1


@pytest.mark.parametrize("second", ["diverged", "hang"])
def test_a_failure_that_hides_another_is_not_the_only_one_found(second: str) -> None:
    """NaN hides a divergence, a conjunction a hang: each is said with its own failure."""
    first = (U, ATTN) if second == "hang" else (N,)
    what = "diverged" if second == "hang" else "nonfinite"
    found, _ = search(rule_of({first: what, (POISON,): second}), wide_case())
    assert {(frozenset(c.changes), c.failure.what) for c in found.causes} == {
        (frozenset(first), what), (frozenset({POISON}), second),
    }  # fmt: skip
    assert found.complete


def test_what_has_no_verdict_leaves_the_answer_open() -> None:
    """Changes that end without a verdict are neither searched nor taken for a pass."""
    found, _ = search(rule_of({(U,): "diverged", (ATTN,): "unsupported"}), wide_case())
    assert (sets_of(found), found.complete) == ([{U}], False)
    assert any("error unsupported, which no cause explains" in note for note in found.notes)


def test_repeats_of_a_question_run_side_by_side() -> None:
    """With room for four, the repeats that learn the rate are one batch, within the budget."""
    case = case_of(run(), run(graph=("attn",)))
    for budget, batches in ((None, [4]), (3, [1, 1, 1])):
        asker = MadeUpAsker(rule_of({(ATTN,): "diverged"}), room=4, max_runs=budget)
        try:
            find_causes(case, verdict_of(case, "diverged"), asker)
        except OutOfBudget:
            assert budget
        assert asker.batches == batches


def test_one_lucky_pass_does_not_make_a_conjunction() -> None:
    """A set that passed once is asked again before the answer rests on it."""

    def lucky(case: CaseSpec) -> str:
        changes = set(LegChanges(case.reference, case.candidate).names)
        was_lucky = changes == {U} and case.candidate.replica == 0
        return "diverged" if U in changes and not was_lucky else ""

    case = wide_case()
    found = find_causes(case, verdict_of(case, "diverged"), MadeUpAsker(of_case=lucky))
    assert sets_of(found) == [{U}]


def test_sets_that_rules_refuse_are_never_run() -> None:
    """What is asked is legal: no scope without the pool that it needs."""
    before = run(fsdp=FsdpConfig(pool="dynamic"))
    case = case_of(before, run(graph=("attn", "mlp"), stress=("poison",), ledger=False))
    found, asker = search(rule_of({(MLP,): "diverged"}), case)
    for config in (asked.candidate.config for asked in asker.asked):
        assert not config["graph"] or config["fsdp"]["pool"] != "dynamic"
    (cause,) = found.causes
    assert set(cause.changes) == {MLP, "fsdp.pool: dynamic -> double"}
    assert cause.unproven == ("fsdp.pool: dynamic -> double",)
    assert found.num_illegal


def test_what_a_budget_cuts_off_says_what_is_known() -> None:
    """The smallest set seen to fail comes along, and nothing is called complete."""
    with pytest.raises(OutOfBudget) as caught:
        search(rule_of({(U, ATTN): "diverged"}), wide_case(), max_runs=9)
    best = caught.value.best
    assert isinstance(best, FoundCauses)
    assert not best.complete
    assert any("budget of 9 runs" in note for note in best.notes)
    assert any(note.startswith("the smallest set that was seen to fail") for note in best.notes)


def test_what_is_no_matter_of_differences_is_not_searched() -> None:
    """A failure that is gone, a reference that differs from itself, runs that do not differ."""
    wide, spec = wide_case(), run()
    same = case_of(spec, RunSpec.from_json(spec.to_json() | {"replica": 5}))
    for case, what, said in (
        (wide, "diverged", "too seldom"),
        (wide, "nondeterministic_reference", "its own second run"),
        (same, "diverged", "do not differ"),
    ):
        found = find_causes(case, verdict_of(case, what), MadeUpAsker(lambda changes: ""))
        assert (found.causes, found.complete) == ((), False)
        assert said in found.notes[0]


@pytest.mark.parametrize("cause", [(U,), (ATTN, POISON)])
def test_a_fault_of_three_runs_in_ten_is_found_for_every_seed(cause: tuple[str, ...]) -> None:
    """Four searches of a flaky fault name its cause; at 99 % one in a hundred may not."""
    for seed in range(4):
        found, _ = search(rule_of({cause: "diverged"}), wide_case(), chance=0.3, seed=seed)
        assert (sets_of(found), found.complete) == ([set(cause)], True), (seed, found.notes)
        assert found.policy is not None
        assert not found.policy.always


def test_every_pair_of_changes_is_found_as_a_conjunction() -> None:
    """No pair is special: each of these 21 is found as one cause of two changes."""
    case = wide_case()
    names = LegChanges(case.reference, case.candidate).names
    for pair in itertools.combinations(names[::2], 2):
        assert sets_of(search(rule_of({pair: "diverged"}), case)[0]) == [set(pair)]


# --- the least case --------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "model": model_from_preset("dense_tiny", {"layers": 8}), "steps": 20, "microbatches": 4,
    "micro_batch_size": 2, "parallel": ParallelConfig(dp=2, tp=2, pp=2, sequence_parallel=True),
    "stress": ("jitter", "poison"), "fsdp": FsdpConfig(pool="traced"), "flush_every": 5,
}  # fmt: skip


def least_of(
    of_case: Callable[[CaseSpec], str], *plants: PlantSpec, max_runs: int | None = None,
    **settings: Any,
) -> tuple[LeastCase, MadeUpAsker]:  # fmt: skip
    """What is left of a wide case whose runs differ in a scope and a plant."""
    case = case_of(run(**(WIDE | settings)), run(*plants, graph=("attn",), **(WIDE | settings)))
    verdict = verdict_of(case, of_case(case))
    asker = MadeUpAsker(of_case=of_case, max_runs=max_runs)
    judged = Judged(case, failure_of(verdict), asker, verdict)
    return find_least(judged, case.reference, case.candidate), asker


def test_what_needs_nothing_ends_as_the_least_legal_case() -> None:
    """One rank, one layer, one microbatch, plain settings, and no more steps than graphs need."""
    least, asker = least_of(lambda case: "diverged")
    for spec, graph in ((least.reference, []), (least.candidate, ["attn"])):
        config = spec.config
        sizes = config["model"]["layers"], config["microbatches"], config["micro_batch_size"]
        assert (spec.world_size, *sizes) == (1, 1, 1, 1)
        assert (config["steps"], config["stress"], config["fsdp"]["pool"]) == (3, [], "double")
        assert (config["graph"], config["parallel"]["sequence_parallel"]) == (graph, False)
    assert asker.num_runs <= 8
    assert "steps 20 -> 3" in least.made


def test_each_size_is_the_least_that_fails() -> None:
    """5 layers, 7 steps, 3 microbatches and a tensor-parallel pair: not only powers of two."""

    def fails(case: CaseSpec) -> str:
        config = case.candidate.config
        needed = (
            config["model"]["layers"] >= 5, config["steps"] >= 7, config["microbatches"] >= 3,
            config["parallel"]["tp"] == 2, "poison" in config["stress"],
        )  # fmt: skip
        return "diverged" if all(needed) else ""

    config = least_of(fails)[0].candidate.config
    assert (config["model"]["layers"], config["steps"], config["microbatches"]) == (5, 7, 3)
    assert [config["parallel"][axis] for axis in ("dp", "tp", "pp")] == [1, 2, 1]
    assert (config["stress"], config["fsdp"]["pool"]) == (["jitter", "poison"], "double")


@pytest.mark.parametrize("layers", [{5}, {2, 5}, {0}])
def test_the_layers_that_must_be_captured(layers: set[int]) -> None:
    """The smallest range of them, in the candidate alone: no layer of its ends can be left out."""

    def fails(case: CaseSpec) -> str:
        config = case.candidate.config
        first, last = config["graph_layers"] or (0, config["model"]["layers"] - 1)
        return "diverged" if layers <= set(range(first, last + 1)) else ""

    least, asker = least_of(fails, parallel=ParallelConfig())
    ends = [min(layers), max(layers)]
    assert least.candidate.config["graph_layers"] in (ends, [] if ends == [0, 0] else ends)
    assert least.candidate.config["model"]["layers"] == max(layers) + 1
    assert least.reference.config["graph_layers"] == []
    assert asker.num_runs <= 20


def test_another_failure_is_not_taken_for_the_same() -> None:
    """A case that crashes when it gets small stays at the size at which it diverges."""
    least, _ = least_of(
        lambda case: "diverged" if case.candidate.config["model"]["layers"] == 8 else "crashed"
    )
    assert (least.candidate.config["model"]["layers"], least.candidate.world_size) == (8, 1)


def test_a_planted_fault_keeps_its_step_and_finds_a_rank() -> None:
    """Steps are not fewer than the plant needs, and a rank that is gone becomes the last."""
    least, asker = least_of(lambda case: "diverged", PlantSpec(fault="ulp", step=11, rank=5))
    assert least.candidate.plant == PlantSpec(fault="ulp", step=11, rank=-1)
    assert min(asked.candidate.config["steps"] for asked in asker.asked) == 12
    for case in asker.asked:  # both shrink alike; the control is the reference
        assert {**case.candidate.config, "graph": [], "graph_layers": []} == case.reference.config
        assert case.control == RunSpec.from_json(case.reference.to_json() | {"replica": 1})


def test_what_a_budget_cuts_off_is_the_least_case_so_far() -> None:
    """The reason is said, and what was made smaller stays."""
    least, _ = least_of(lambda case: "diverged", max_runs=1)
    assert least.made == ("steps 20 -> 3",)
    assert "budget of 1 runs" in least.stopped


def test_layouts_of_fewer_ranks_that_pass_are_named() -> None:
    """All products of fewer ranks; those that fail in another way prove nothing."""
    for other, passed in (
        ("", ("one rank", "dp 2", "tp 2", "pp 2", "dp 2 tp 2", "dp 2 pp 2", "tp 2 pp 2")),
        ("crashed", ()),
    ):
        answers = dict.fromkeys(range(1, 8), other) | {8: "diverged"}
        least, _ = least_of(lambda case, known=answers: known[case.candidate.world_size])  # type: ignore[misc]
        assert (least.candidate.world_size, least.passed) == (8, passed)


@pytest.mark.parametrize("first", range(1, 10))
def test_halving_finds_the_first_value_that_fails(first: int) -> None:
    """The first one is asked first, none twice; behind the last there is none."""
    asked: list[int] = []

    def fails(value: int) -> bool:
        asked.append(value)
        return value >= first

    assert first_failing(range(1, 9), fails) == (first if first < 9 else None)
    assert asked[0] == 1
    assert len(asked) == len(set(asked)) <= 4


# --- the scenario ----------------------------------------------------------------------------


def repro_of(reference: RunSpec, candidate: RunSpec, **options: Any) -> Repro:
    """What is written for two runs."""
    case = case_of(reference, candidate)
    asker = MadeUpAsker(**(options or {"of_case": lambda case: "diverged"}))
    judged = Judged(case, DIVERGED, asker)
    return find_repro(case, judged, reference, candidate, story="Because.")


ZEROS = [PlantSpec(fault=f"{sign}_zero", step=3) for sign in ("positive", "negative")]
ZEROS[0] = PlantSpec(fault="positive_zero", step=3, legs=("reference",))
RARE = PlantSpec(fault="nan", step=4, rank=0, chance=0.3)
SHARED: dict[str, Any] = {
    "model": model_from_preset("dense_tiny", {"layers": 3, "ffn": 96}), "microbatches": 2,
    "dtype": "fp32", "steps": 4,
}  # fmt: skip
AXES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"graph": ("attn",)}), ({"stress": ("races",)}, {"stress": ("jitter", "races")}),
    ({}, {"fsdp": FsdpConfig(pool="traced", reshard_after_forward=False)}),
    ({"ledger": True}, {"ledger": False}), ({}, {"flush_every": 3}),
    ({}, {"parallel": ParallelConfig(tp=2)}),
]  # fmt: skip
PAIRS: list[tuple[RunSpec, RunSpec]] = [
    *((run(**(SHARED | before)), run(**(SHARED | after))) for before, after in AXES),
    *((run(), run(*plants, graph=graph))
      for plants in ((ULP,), (ULP, RARE)) for graph in ((), ("attn",))),
    (run(ZEROS[0]), run(ZEROS[1])),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "candidate"), PAIRS)
def test_the_scenario_has_the_runs_that_were_asked_for(
    reference: RunSpec, candidate: RunSpec
) -> None:
    """Whatever differs, faults and their counterparts, too: what is read back is the same."""
    case = repro_of(reference, candidate).case
    assert case is not None
    assert (case.reference.config, case.candidate.config) == (reference.config, candidate.config)
    assert (case.reference.plant, case.candidate.plant) == (reference.plant, candidate.plant)


def test_the_axis_that_shows_the_failure_is_found_by_asking() -> None:
    """Where it only fails with the stressor compared, that scenario is kept; else none is."""
    candidate = run(graph=("attn",), stress=("poison",))
    repro = repro_of(
        run(), candidate,
        of_case=lambda case: "" if case.reference.config["stress"] else "diverged",
    )  # fmt: skip
    assert yaml.safe_load(repro.text)["compare"]["axis"] == "stress"
    repro = repro_of(run(), candidate, of_case=lambda case: "")
    assert (repro.text, repro.case) == ("", None)
    assert repro.why_not == ("graph compared: passes", "stress compared: passes")


def test_no_file_is_written_over_another(tmp_path: Path) -> None:
    """A second one of the same name gets a number, and all can be read back."""
    repro = repro_of(run(), run(graph=("attn",)))
    paths = [write_repro(repro, tmp_path / "repro") for _ in range(3)]
    names = [f"repro_made_up_dp2_attn{number}.yaml" for number in ("", "-2", "-3")]
    assert [path.name for path in paths] == names
    assert all(read_back(path.read_text(), "cpu") == repro.case for path in paths)


@pytest.mark.parametrize(
    ("folder", "is_there", "seen"),
    [("scenarios/repro", False, False), ("scenarios/repro", True, True), ("mine", False, True)],
)
def test_git_ignores_what_a_search_leaves_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_there: bool, seen: bool
) -> None:
    """The folder of its own choice, when it makes it; not one that was there, or was named."""
    monkeypatch.chdir(tmp_path)
    if is_there:
        Path(folder).mkdir(parents=True)
    git = ["git", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q"], check=True)
    write_repro(repro_of(run(), run(graph=("attn",))), Path(folder))
    status = subprocess.run(
        [*git, "status", "--porcelain", "-uall"], check=True, capture_output=True, text=True
    ).stdout
    assert bool(status) == (f"{folder}/repro_made_up_dp2_attn.yaml" in status) == seen


def test_long_names_and_stories_are_cut_to_what_a_scenario_may_hold() -> None:
    """Whatever the case is called, the text decodes."""
    reference, candidate = run(), run(graph=("attn",))
    case = CaseSpec.from_json(case_of(reference, candidate).to_json() | {"id": "x-+=" * 40})
    (text,) = scenarios(case, reference, candidate, story="A long story. " * 200)
    assert read_back(text, "cpu").candidate.config == candidate.config


def _needs_both(case: CaseSpec) -> str:
    """With the scope mlp and the stressor poison, from three steps on."""
    config, other = case.candidate.config, case.reference.config
    both = "mlp" in config["graph"] and "poison" in config["stress"] and not other["graph"]
    return "diverged" if both and config["steps"] >= 4 else ""


def test_the_file_holds_the_cause_and_nothing_else(tmp_path: Path) -> None:
    """Of six changes the two are left, with the least sizes, the story and the command."""
    candidate = run(ULP, graph=("attn", "mlp"), stress=("jitter", "poison"), ledger=False)
    case = case_of(run(), candidate)
    asker, verdict = MadeUpAsker(of_case=_needs_both), verdict_of(case, "diverged")
    causes = find_causes(case, verdict, asker)
    alone = leave_alone(case, verdict, causes, asker, folder=tmp_path, place="layers.0.mlp")
    (path,) = tmp_path.iterdir()
    assert str(alone) == f"harness run {path} (1 rank, 1 layer, 4 steps, 1 microbatch)"
    text = path.read_text()
    assert "graph: mlp and stress: poison together. Layers.0.mlp." in " ".join(text.split())
    least = read_back(text, "cpu")
    assert _needs_both(least)
    config = least.candidate.config
    assert (config["graph"], config["stress"]) == (["mlp"], ["poison"])
    assert least.candidate.plant is None


def test_nothing_is_written_that_was_not_run(tmp_path: Path) -> None:
    """A failure that is gone has no least case, and says so; a budget that ends leaves no file."""
    case = case_of(run(), run(graph=("attn",)))
    verdict = verdict_of(case, "diverged")
    causes = find_causes(case, verdict, MadeUpAsker(of_case=lambda case: "diverged"))
    passing = MadeUpAsker(of_case=lambda case: "")
    alone = leave_alone(case, verdict, causes, passing, folder=tmp_path)
    assert (alone.path, alone.notes) == ("", ("the cause alone did not fail again",))
    poor = MadeUpAsker(of_case=lambda case: "diverged", max_runs=1)
    with pytest.raises(OutOfBudget, match="budget of 1 runs"):
        leave_alone(case, verdict, None, poor, folder=tmp_path)
    assert not any(tmp_path.iterdir())
