"""From a failing case to its causes, its least case and a scenario that fails alone."""

import math
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.config import FsdpConfig, OptimConfig, ParallelConfig, model_from_preset
from harness.bisect.causes import FoundCauses, LeastCase, find_causes
from harness.bisect.differences import RunChanges
from harness.bisect.experiments import (
    Answer,
    Failure,
    Judged,
    NeverFails,
    Questions,
    Reply,
    failure_of,
    learn,
)
from harness.bisect.repro import find_repro, read_back, scenarios, write_minimal_case, write_new
from harness.records import CaseSpec, PlantSpec, RunSpec
from tests.unit.harness.bisect.made_up_asker import (
    MadeUpAsker,
    Rule,
    case_of,
    program_run,
    run,
    verdict_of,
)

ULP, NAN = PlantSpec(fault="ulp", step=3), PlantSpec(fault="nan", step=4)
U, N = "plant: ulp in step 3 on the last rank", "plant: nan in step 4 on the last rank"
ATTN, MLP, POISON = "graph: attn", "graph: mlp", "stress: poison"
LEDGER, POOL = "ledger: true -> false", "fsdp.pool: double -> traced"
DIVERGED = Failure(outcome="failed", what="diverged")
WIDE_CASE = case_of(run(), run(
    ULP, NAN, graph=("attn", "mlp"), stress=("jitter", "poison", "scramble", "races"), ledger=False,
    fsdp=FsdpConfig(pool="traced"), flush_every=2, stress_seed=7, optim=OptimConfig(lr=2e-3),
))  # fmt: skip
"""Runs that differ in a dozen changes, which are all legal by themselves."""
NAMES = RunChanges(WIDE_CASE.reference, WIDE_CASE.candidate).names
ONE_CHANGE = case_of(run(), run(graph=("attn",)))


def search(
    rule: Rule, case: CaseSpec = WIDE_CASE, **options: Any
) -> tuple[FoundCauses, MadeUpAsker]:
    """What is found of a case whose candidates fail by a rule."""
    asker = MadeUpAsker(rule, **options)
    what = MadeUpAsker(rule).verdict(case).what
    return find_causes(case, verdict_of(case, what), asker), asker


def rule_of(causes: dict[tuple[str, ...], str]) -> Rule:
    """Fails as the first cause does whose changes are all there."""
    return lambda changes: next((w for c, w in causes.items() if set(c) <= changes), "")


def sets_of(found: FoundCauses) -> set[frozenset[str]]:
    return {frozenset(cause.changes) for cause in found.causes}


# --- causes ----------------------------------------------------------------------------------


def drawn_sets(seed: int) -> tuple[tuple[str, ...], ...]:
    """Three sets of changes at random, without those that hold another."""
    drawn = random.Random(seed)
    sets = [frozenset(drawn.sample(NAMES, drawn.randint(1, 3))) for _ in range(3)]
    least = [s for s in set(sets) if not any(other < s for other in sets)]
    return tuple(sorted(tuple(sorted(s)) for s in least))


@pytest.mark.parametrize(
    "sets",
    [((ATTN,),), ((U,), (N,)), ((U, POISON),), ((U, ATTN), (N,)), ((U, ATTN), (N, POISON)),
     ((U, ATTN), (U, MLP)), ((POISON, LEDGER, MLP),), ((ATTN,), (MLP,), (POOL,)),
     *map(drawn_sets, range(20))],
    ids=str,
)  # fmt: skip
def test_every_minimal_set_is_found_and_nothing_else(sets: tuple[tuple[str, ...], ...]) -> None:
    """Single changes, conjunctions, such as share a change, and several of them, among a dozen."""
    found, asker = search(rule_of(dict.fromkeys(sets, "diverged")))
    assert sets_of(found) == set(map(frozenset, sets))
    assert (found.complete, len(found.candidates)) == (True, 13)
    if len(sets) == len(sets[0]) == 1:
        assert asker.num_runs <= 4 + 4 + 9  # halvings, repeats of the case and of one pass


@pytest.mark.parametrize("second", ["diverged", "hang"])
def test_a_failure_that_hides_another_is_not_the_only_one_found(second: str) -> None:
    """NaN hides a divergence, a conjunction a hang: each is said with its own failure."""
    first, what = ((U, ATTN), "diverged") if second == "hang" else ((N,), "nonfinite")
    found, _ = search(rule_of({first: what, (POISON,): second}))
    failures = {(frozenset(c.changes), c.failure.what) for c in found.causes}
    assert failures == {(frozenset(first), what), (frozenset({POISON}), second)}
    assert found.complete


def test_what_has_no_verdict_leaves_the_answer_open() -> None:
    """Changes that end without a verdict are neither searched nor taken for a pass."""
    found, _ = search(rule_of({(U,): "diverged", (ATTN,): "unsupported"}))
    assert (sets_of(found), found.complete) == ({frozenset({U})}, False)
    assert any("error unsupported, which no cause explains" in note for note in found.notes)


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


SAME = case_of(run(), RunSpec.from_json(run().to_json() | {"replica": 5}))


@pytest.mark.parametrize(
    ("case", "what", "said"),
    [(WIDE_CASE, "diverged", "too seldom"), (SAME, "diverged", "do not differ"),
     (WIDE_CASE, "nondeterministic_reference", "its own second run")],
)  # fmt: skip
def test_what_is_no_matter_of_differences_is_not_searched(
    case: CaseSpec, what: str, said: str
) -> None:
    """A failure that is gone, a reference that differs from itself, runs that do not differ."""
    found = find_causes(case, verdict_of(case, what), MadeUpAsker(lambda changes: ""))
    assert (found.causes, found.complete, said in found.notes[0]) == ((), False, True)


@pytest.mark.parametrize("cause", [(U,), (ATTN, POISON)])
def test_a_fault_of_three_runs_in_ten_is_found_for_every_seed(cause: tuple[str, ...]) -> None:
    """Searches of a flaky fault name its cause; at 99 % one in a hundred may not."""
    for seed in range(2):
        found, _ = search(rule_of({cause: "diverged"}), chance=0.3, seed=seed)
        assert (sets_of(found), found.complete) == ({frozenset(cause)}, True), (seed, found.notes)
        assert found.policy is not None
        assert not found.policy.always


# --- the least case --------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "model": model_from_preset("dense_tiny", {"layers": 8}), "steps": 20, "microbatches": 4,
    "micro_batch_size": 2, "parallel": ParallelConfig(dp=2, tp=2, pp=2, sequence_parallel=True),
    "stress": ("jitter", "poison"), "fsdp": FsdpConfig(pool="traced"), "flush_every": 5,
}  # fmt: skip


def least_of(
    of_case: Callable[[CaseSpec], str], *plants: PlantSpec, **settings: Any
) -> tuple[LeastCase, MadeUpAsker]:
    """What is left of a wide case whose runs differ in a scope and a plant."""
    case = case_of(run(**(WIDE | settings)), run(*plants, graph=("attn",), **(WIDE | settings)))
    verdict = verdict_of(case, of_case(case))
    asker = MadeUpAsker(of_case=of_case)
    judged = Judged(case, failure_of(verdict), asker, verdict)
    return LeastCase(judged, case.reference, case.candidate), asker


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


def test_a_planted_fault_keeps_its_step_and_finds_a_rank() -> None:
    """Steps are not fewer than the plant needs, and a rank that is gone becomes the last."""
    least, asker = least_of(lambda case: "diverged", PlantSpec(fault="ulp", step=11, rank=5))
    assert least.candidate.plant == PlantSpec(fault="ulp", step=11, rank=-1)
    assert min(asked.candidate.config["steps"] for asked in asker.asked) == 12
    for case in asker.asked:  # both shrink alike; the control is the reference
        assert {**case.candidate.config, "graph": [], "graph_layers": []} == case.reference.config
        assert case.control == RunSpec.from_json(case.reference.to_json() | {"replica": 1})


@pytest.mark.parametrize(
    ("other", "passed"),
    [("", ["one rank", "dp 2", "tp 2", "pp 2", "dp 2 tp 2", "dp 2 pp 2", "tp 2 pp 2"]),
     ("crashed", [])],
)  # fmt: skip
def test_layouts_of_fewer_ranks_that_pass_are_named(other: str, passed: list[str]) -> None:
    """All products of fewer ranks."""
    least, _ = least_of(lambda case: "diverged" if case.candidate.world_size == 8 else other)
    assert (least.candidate.world_size, least.passed) == (8, passed)


# --- the scenario ----------------------------------------------------------------------------


def repro_of(reference: RunSpec, candidate: RunSpec, **options: Any) -> tuple[str, tuple[str, ...]]:
    """What is written for two runs, and why nothing is."""
    asker = MadeUpAsker(**(options or {"of_case": lambda case: "diverged"}))
    judged = Judged(case_of(reference, candidate), DIVERGED, asker)
    return find_repro(judged, reference, candidate, story="Because.")


PLUS = PlantSpec(fault="positive_zero", step=3, legs=("reference",))
MINUS = PlantSpec(fault="negative_zero", step=3)
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


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [*((run(**(SHARED | before)), run(**(SHARED | after))) for before, after in AXES),
     *((run(), run(*plants, graph=graph))
       for plants in ((ULP,), (ULP, RARE)) for graph in ((), ("attn",))),
     (run(PLUS), run(MINUS))],
)  # fmt: skip
def test_the_scenario_has_the_runs_that_were_asked_for(
    reference: RunSpec, candidate: RunSpec
) -> None:
    """Whatever differs, faults and their counterparts, too: what is read back is the same."""
    case = read_back(repro_of(reference, candidate)[0], "cpu")
    assert (case.reference.config, case.candidate.config) == (reference.config, candidate.config)
    assert (case.reference.plant, case.candidate.plant) == (reference.plant, candidate.plant)


def same_runs(reference: RunSpec, candidate: RunSpec, folder: Path) -> None:
    """The scenario of two runs, read back, makes runs of equal keys: they are not made again."""
    case = case_of(reference, candidate)
    for text in scenarios(case, reference, candidate, story="w", folder=folder):
        found = read_back(text, "cpu", folder)
        assert (found.reference.key, found.candidate.key) == (reference.key, candidate.key)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize(
    "setting", [{"stress": ["poison"]}, {"determinism": "enforce"}, {"every": 2}], ids=str
)
def test_settings_of_one_run_alone_come_and_go(tmp_path: Path, whose: int, setting: Any) -> None:
    """Taken away they are not there, as in a run whose scenario says nothing; so in a scenario."""
    (tmp_path / "train.py").write_text("")
    specs = [program_run(tmp_path, **(setting if number == whose else {})) for number in (0, 1)]
    legs = RunChanges(*specs)
    assert [legs.run_with(names).key for names in ((), legs.names)] == [s.key for s in specs]
    same_runs(specs[0], specs[1], tmp_path)


def test_the_scenario_is_the_same_two_runs(tmp_path: Path) -> None:
    """Also from another folder, and where a text looks like a number."""
    (tmp_path / "train.py").write_text("")
    parts: dict[str, Any] = {"env": {"B": "2"}, "packages": {"toy": "1.10"}}
    args = {"steps": 8, "model.dim": 8, "new": True, "word": "yes", "rate": "1e-3"}
    reference = program_run(tmp_path, args=args, **parts)
    candidate = program_run(tmp_path, args=args | {"old": "1e-3"}, **parts)
    same_runs(reference, candidate, tmp_path / "scenarios" / "repro")


@pytest.mark.parametrize(
    ("folder", "is_there", "seen"),
    [("scenarios/repro", False, False), ("scenarios/repro", True, True), ("mine", False, True)],
)
def test_git_ignores_what_a_search_leaves_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_there: bool, seen: bool
) -> None:
    """The folder of its own choice, when it makes it; no file is written over another."""
    monkeypatch.chdir(tmp_path)
    if is_there:
        Path(folder).mkdir(parents=True)
    git = ["git", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q"], check=True)
    paths = [write_new(text, "x", Path(folder)) for text in "abc"]
    assert [p.name + p.read_text() for p in paths] == ["x.yamla", "x-2.yamlb", "x-3.yamlc"]
    status = subprocess.run(
        [*git, "status", "--porcelain", "-uall"], check=True, capture_output=True, text=True
    ).stdout
    assert bool(status) == (f"{folder}/x.yaml" in status) == seen


def _needs_both(case: CaseSpec) -> str:
    """With the scope mlp and the stressor poison, from three steps on."""
    config, other = case.candidate.config, case.reference.config
    both = "mlp" in config["graph"] and "poison" in config["stress"] and not other["graph"]
    return "diverged" if both and config["steps"] >= 4 else ""


def test_the_file_holds_the_cause_and_nothing_else(tmp_path: Path) -> None:
    """Of six changes the two are left, with the least sizes, the story and the command."""
    candidate = run(ULP, graph=("attn", "mlp"), stress=("jitter", "poison"), ledger=False)
    case, asker = case_of(run(), candidate), MadeUpAsker(of_case=_needs_both)
    causes = find_causes(case, verdict_of(case, "diverged"), asker)
    alone = write_minimal_case(case, causes, asker, folder=tmp_path, place="layers.0.mlp")
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
    """A failure that is gone has no least case, and says so."""
    causes, _ = search(rule_of({(ATTN,): "diverged"}), ONE_CHANGE)
    alone = write_minimal_case(
        ONE_CHANGE, causes, MadeUpAsker(of_case=lambda case: ""), folder=tmp_path
    )
    assert (alone.path, alone.notes) == ("", ("the cause alone did not fail again",))
    assert not any(tmp_path.iterdir())


# --- questions: passes that are not luck, nothing asked twice ---


FAILED = Reply(answer="fails", words="it failed")


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.4])
def test_whatever_the_rate_a_fault_seldom_passes_as_often_as_asked(rate: float) -> None:
    """That it is learnt and then passes is no more frequent than the share of the doubt."""
    drawn, missed, number = random.Random(f"{rate}"), 0.0, 4000
    for _ in range(number):
        policy = learn(lambda _: "fails" if drawn.random() < rate else "passes", num_questions=1)
        missed += (1 - rate) ** policy.confirmations
    assert missed / number <= 0.01


def test_a_fault_of_every_run_is_asked_once_on_the_way() -> None:
    """And as often as 99 % takes where a conclusion rests on it; not where a pass was luck."""
    policy = learn(lambda _: "fails", num_questions=1)
    assert (policy.failures, policy.trials, policy.passes, policy.always) == (5, 5, 1, True)
    f, n = policy.failures, policy.confirmations
    worst = max((p / 999) ** f * (1 - p / 999) ** n for p in range(1000))
    assert worst <= 0.01 < worst * (1 + f / n) * math.e
    flaky = learn(lambda _: "fails", num_questions=1, flaky=True)
    assert (flaky.failures, flaky.passes) == (10, flaky.confirmations)
    assert flaky.passes > 1


@pytest.mark.parametrize(
    ("answers", "said"),
    [(["passes"], "0 of 30 runs"), (["fails", *["passes"] * 99], "2 of 200 runs"),
     (["fails", "unresolved"], "run 2 of the full case gave no answer")],
)  # fmt: skip
def test_what_fails_too_seldom_is_given_up(answers: list[Answer], said: str) -> None:
    """After 30 passes and no failure, or after 200 runs; or where a run says nothing."""
    with pytest.raises(NeverFails, match=said):
        learn(lambda number: answers[number % len(answers)], num_questions=1)


def never() -> Reply:
    raise KeyboardInterrupt


def test_a_reply_is_kept_for_the_next_sitting(tmp_path: Path) -> None:
    """What is known takes no run; what raises, or is damaged, is asked again."""
    first = Questions(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.reply("a", "does a fail?", 3, never)
    assert (first.asked, list(tmp_path.iterdir())) == ((), [])
    assert first.reply("a", "does a fail?", 3, lambda: FAILED) == FAILED
    second = Questions(tmp_path)
    assert second.reply("a", "does a fail?", 3, never) == FAILED
    assert [asked.runs for each in (first, second) for asked in each.asked] == [3, 0]
    (path,) = tmp_path.iterdir()
    data, other = path.read_bytes(), Reply(answer="passes")
    for damaged in (data.replace(b"it", b"at"), data[:-9], b""):
        path.write_bytes(damaged)
        assert Questions(tmp_path).reply("a", "a?", 1, lambda: other) == other
