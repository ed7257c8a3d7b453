"""What counts as detected, which of a fault's cases the row is of, and how well it was found."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.bisect.found import Location
from harness.campaign.campaign import Judged, Matrix, Row, bounds, fields_of, localised, row_of
from harness.campaign.cases import (
    BARE,
    BROKEN,
    RACES,
    WHOLE,
    cases_of,
    clean_cases,
    fault_case,
    scenario_text,
    variants,
)
from harness.faults.catalogue import CATALOGUE, Pointer, read_table
from harness.records import (
    WHATS,
    Device,
    Difference,
    Outcome,
    RunResult,
    RunSpec,
    StepRecord,
    Verdict,
    What,
)
from harness.scenario.schema import decode_scenario
from harness.store import LEGS, CaseRuns
from tests.support import records, run_records
from tests.support.fake_engine import Cli, FakeEngine, other_bits

FAULT = CATALOGUE["early_release"]
Said = tuple[Outcome, What]
PASSED: Said = ("passed", "")
SEEN: Said = ("failed", "nonfinite")


def verdict(case_id: str, outcome: Outcome, what: What = "") -> Verdict:
    at = Difference(step=4, rank=1, quantity="weights") if outcome == "failed" else None
    return records.verdict(case_id, outcome=outcome, what=what, message="why", difference=at)


def held(said: dict[str, Said], *, acted: bool = True, fault: str = FAULT.name) -> list[Judged]:
    """The cases of a fault, with made-up verdicts by variant; others pass."""
    entry = CATALOGUE[fault]
    found = []
    for variant in variants(entry):
        case = fault_case(entry, variant, "cpu")
        runs = {leg: _run(getattr(case, leg), acted=acted and leg == "candidate") for leg in LEGS}
        judged = verdict(case.id, *said.get(variant.name, PASSED))
        found.append(Judged(case, judged, CaseRuns(case=case, **runs)))
    return found


def _run(spec: RunSpec, *, acted: bool) -> RunResult:
    run = run_records.LAB.run(spec)
    run = run_records.edit(run, wall_s=2.0)
    return run_records.told(run, 0, ("planted", {})) if acted else run


@pytest.mark.parametrize(
    ("said", "under", "searched"),
    [
        ({"poison": SEEN, "scramble": SEEN, WHOLE: SEEN}, ("poison",), "early_release"),
        ({BARE: SEEN}, (), "early_release.bare"),
    ],
)
def test_the_row_is_of_the_barest_case_that_sees_it(said: Any, under: Any, searched: str) -> None:
    """No stressor before one, one before several; the search starts from the whole setup."""
    asked = []

    def search(runs: CaseRuns, verdict: Verdict) -> Location:
        asked.append(verdict.case_id)
        return Location(step=3, phase="forward", rank=1, tensor="embedding:output", module="x")

    row = row_of(FAULT, held(said), search)
    assert (row.status, row.under, asked) == ("detected", under, [searched])
    assert (row.planted_step, row.planted_rank, row.detected_step) == (3, 1, 4)
    assert "3 +1" in fields_of(row)
    # Four candidates, and a reference and a control that they share.
    assert (row.runs, row.seconds, row.localised) == (6, 12.0, "near")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (PASSED, "missed"),
        (("failed", "crashed"), "misjudged"),
        (("failed", "oom"), "misjudged"),
        (("error", "nonfinite"), "misjudged"),
        (("incomparable", "nondeterministic_reference"), "misjudged"),
    ],
)
def test_only_what_the_entry_expects_is_a_detection(said: Said, status: str) -> None:
    """A failure in other words, or no verdict, is none."""
    row = row_of(FAULT, held(dict.fromkeys((BARE, "poison", "scramble", WHOLE), said)))
    assert (row.status, bool(row.reason), row.counts) == (status, True, True)


def test_a_run_that_ended_before_anything_was_planted_proves_nothing() -> None:
    """A crash that is expected counts only where a rank says that it planted it."""
    said: dict[str, Said] = {WHOLE: ("failed", "crashed")}
    for acted, status in ((True, "detected"), (False, "misjudged")):
        assert row_of(CATALOGUE["raise"], held(said, acted=acted, fault="raise")).status == status


def test_what_cannot_be_planted_is_not_counted_but_a_broken_entry_is() -> None:
    """Another device is a reason, an illegal setup is the catalogue's fault."""
    row = row_of(CATALOGUE["raise"], held({WHOLE: ("skipped", "unsupported")}, fault="raise"))
    assert (row.status, row.reason, row.counts) == ("not run", "why", False)
    assert dataclasses.replace(row, reason=f"{BROKEN}parallel.tp").counts


# ---- the matrix


def matrix(device: str, *rows: Row, clean: str = "", **more: Any) -> Matrix:
    more = dict[str, Any](skipped=0, alarms=()) | more
    return Matrix(device=device, rows=rows, clean=tuple(clean), **more)


def test_rates_count_what_ran() -> None:
    """Faults of other devices are in no rate; alarms are held against clean cases."""
    rows = (
        Row(fault="ulp", status="detected", localised="exactly"),
        Row(fault="nan", status="detected", localised="near"),
        Row(fault="leak", status="missed"),
        Row(fault="illegal_access", status="not run", reason="needs cuda"),
    )
    alarm = verdict("clean.x", "failed", "diverged")
    rates = matrix("cpu", *rows, clean="abcde", alarms=(alarm,)).rates()
    counted = [(rate.successes, rate.trials) for rate in rates.values()]
    assert counted == [(2, 3), (1, 2), (2, 2), (1, 5)]
    assert all(0 <= rate.low <= rate.successes / rate.trials <= rate.high
               for rate in rates.values())  # fmt: skip


# ---- places

POINTER = Pointer(phase="backward", module="layers.1.attn*", tensor="layers.1.attn.*.weight")
OUTSIDE = Pointer(phase="outside")
TRUE = Location(
    step=3, phase="backward", module="layers.1.attn.attention", quantity="grads",
    tensor="layers.1.attn.attention.wq.weight", rank=1, ranks=(1,),
)  # fmt: skip
FAR = {"module": "layers.0.mlp", "tensor": "layers.0.mlp:output"}


@pytest.mark.parametrize(
    ("pointer", "changes", "how"),
    [
        (POINTER, {}, "exactly"),
        (dataclasses.replace(POINTER, later=1), {"step": 4}, "exactly"),
        (dataclasses.replace(POINTER, later=1), {"step": 5}, "near"),
        (dataclasses.replace(POINTER, later=1), {"step": 3}, "no"),
        (POINTER, {"phase": "forward"}, "near"),
        (POINTER, {"step": 4}, "near"),
        (POINTER, {"step": None}, "near"),
        (POINTER, {"rank": 0}, "near"),
        (POINTER, {"rank": None}, "near"),
        (POINTER, {"tensor": ""}, "near"),
        (POINTER, {"tensor": "layers.1.attn.attention.wq.weight.exp_avg"}, "near"),
        (POINTER, {"module": "layers.1.mlp", "tensor": "layers.1.mlp.w1.weight"}, "near"),
        (POINTER, FAR, "no"),
        (POINTER, {"step": 2}, "no"),
        (POINTER, {"step": 5}, "no"),
        (POINTER, {"module": "", "tensor": ""}, "no"),
        (POINTER, dataclasses.asdict(Location()), "no"),
        (OUTSIDE, dataclasses.asdict(Location()), "no"),
        # A pointer asks only for what it names.
        (OUTSIDE, {"phase": "outside"}, "exactly"),
        (OUTSIDE, {"phase": "outside", "step": 4}, "near"),
        (OUTSIDE, {"phase": "forward"}, "near"),
        (OUTSIDE, {"phase": "forward", "rank": 0}, "no"),
    ],
)
def test_an_answer_is_exact_near_or_wrong(pointer: Pointer, changes: Any, how: str) -> None:
    """Exact in all that the pointer names; near in one part of the model, or on the rank."""
    found = dataclasses.replace(TRUE, **changes)
    assert localised(found, pointer, step=3, rank=1) == how


@pytest.mark.parametrize(
    ("pattern", "tensor"),
    [
        ("embedding:output", "embedding:output[1]"),
        ("grads:embedding.weight", "embedding.weight"),
        ("embedding.weight", "grads:embedding.weight"),
        ("embedding:output[[]1]", "embedding:output[1]"),
    ],
)
def test_a_tensor_has_several_spellings(pattern: str, tensor: str) -> None:
    """With and without its quantity, a call with and without its number."""
    found = dataclasses.replace(TRUE, tensor=tensor)
    pointer = Pointer(phase="backward", tensor=pattern)
    assert localised(found, pointer, step=3, rank=1) == "exactly"


# --- the table of faults ---


ROW = """
== data: Tokens.
# Why it is so.
other | F1 | step rank tensor | graph=attn+mlp stress=races dp=2 dynamic_cp=[1,2] model.layers=3
    model.preset=tiny seed=1 step=2 rank=0 legs=reference+control timeout_s=20 later=1 devices=cuda
    scopes=mlp needs.tp=2 counterpart=ulp checks.peak_memory.max_ratio=1.5 |
    race diverged | reduce - main grad * | -0.0 is written. |
    nothing | after: element $tensor
    ulp
least | - | - | - | crashed | forward layers.* | It ends. | it ends | fail raise
"""


@pytest.mark.parametrize(
    "text",
    ["a | b | c", ROW.replace("data", "date"), ROW[1:].partition("\n")[2], ROW + ROW],
)
def test_a_row_that_is_not_whole_is_refused(text: str) -> None:
    """Nine columns under a known kind, and each name once."""
    with pytest.raises(ValueError, match="expected 9 columns and a new name"):
        read_table(text)


def test_every_entry_is_whole_and_has_legal_cases_that_plant_it() -> None:
    """A sentence, a device, a place, words that a verdict can give; a scenario to copy."""
    ids = []
    for fault in CATALOGUE.values():
        assert fault.description.endswith(".")
        assert fault.symptom
        assert fault.points_at.phase
        assert fault.expects
        assert set(fault.expects) <= set(WHATS) - {""}
        if fault.counterpart:
            other = CATALOGUE[fault.counterpart]
            assert (other.takes, other.counterpart) == (fault.takes, "")
        device: Device = "cpu" if "cpu" in fault.devices else "cuda"
        for variant in variants(fault, device):
            case = fault_case(fault, variant, device)
            ids.append(case.id)
            assert not case.skip_reason, (fault.name, variant.name, case.skip_reason)
            assert case.labels["fault"] == fault.name
            assert {getattr(case, leg).plant.fault for leg in fault.setup.legs} == {fault.name}
            assert len({getattr(case, leg).key for leg in LEGS}) == 3
        text = scenario_text(fault)
        assert decode_scenario(text.encode(), "shown").why == fault.description
        (case,) = cases_of(text, device)
        assert case.candidate.config["graph"] == list(fault.setup.graph)
    assert len(set(ids)) == len(ids)
    assert len(CATALOGUE) >= 172


def test_a_setup_with_stressors_is_run_bare_and_with_each_alone() -> None:
    """So that what a plain run would have shown is a run, not a guess."""
    fault = CATALOGUE["early_release"]
    cases = {v.name: fault_case(fault, v, "cpu") for v in variants(fault)}
    configs = {name: case.candidate.config for name, case in cases.items()}
    assert {name: (each["stress"], each["ledger"]) for name, each in configs.items()} == {
        BARE: ([], False), "poison": (["poison"], True), "scramble": (["scramble"], True),
        WHOLE: (["poison", "scramble"], True),
    }  # fmt: skip
    assert len({case.reference.key for case in cases.values()}) == 1


def test_on_gpus_the_other_stressors_stand_in_for_races() -> None:
    """Races are seen on the CPU alone; a fault of GPUs is skipped there, with the reason."""
    fault = CATALOGUE["gather_ignores_writes"]
    assert RACES in fault.setup.stress
    found = {v.name: v.stress for v in variants(fault, "cuda")}
    assert list(found) == [BARE, "jitter", "poison", "scramble", WHOLE]
    assert found[WHOLE] == ("jitter", "poison", "scramble")
    (clean,) = clean_cases([fault], 1, "cuda")
    assert clean.candidate.config["stress"] == ["jitter", "poison", "scramble"]
    fault = CATALOGUE["illegal_access"]
    assert "cuda" in fault_case(fault, variants(fault)[-1], "cpu").skip_reason


def test_clean_cases_are_many_differ_and_plant_nothing() -> None:
    """200 of them, no two the same run, layouts and scopes and stressors of many kinds."""
    cases = clean_cases(CATALOGUE.values(), 200, "cpu")
    assert len({case.candidate.key for case in cases}) == len({case.id for case in cases}) == 200
    for case in cases:
        assert [getattr(case, leg).plant for leg in LEGS] == [None] * 3
        assert case.labels["clean"]
        assert case.reference.config["graph"] == case.reference.config["stress"] == []
    held = [case.candidate.config for case in cases]
    for key, least in (("parallel", 7), ("graph", 7), ("stress", 4)):
        assert len({str(config[key]) for config in held}) >= least
    assert len({case.reference.key for case in cases}) <= 60


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 50, 0.0, 0.1005), (50, 50, 0.8995, 1.0), (19, 20, 0.6828, 0.9998), (0, 0, 0.0, 1.0),
     (4, 10, 0.0768, 0.8091), (3, 2000, 0.0001691, 0.005478)],
)  # fmt: skip
def test_bounds_of_a_rate_are_exact(successes: int, trials: int, low: float, high: float) -> None:
    """Those of Clopper and Pearson at 99 %, as tables have them."""
    found = bounds(successes, trials, 0.99)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-6)


# --- `harness faults`: what it lists, what it runs, and when it ends with 0 -----------------------


RAN = ("run", "--clean", "3", "--out", "made")


@pytest.fixture
def plants(engine: FakeEngine) -> FakeEngine:
    """An engine in which `ulp` acts and nothing else does."""

    def spoil(spec: RunSpec, record: StepRecord) -> StepRecord:
        plant, is_last = spec.plant, record.rank == spec.world_size - 1
        acts = plant is not None and plant.fault == "ulp" and is_last and record.step >= plant.step
        return other_bits(record) if acts else record

    engine.spoil = spoil
    return engine


def test_a_fault_that_is_seen_ends_with_0(plants: FakeEngine, cli: Cli) -> None:
    """The row says by which check, in which step and place."""
    plain = cli.json("faults", *RAN, "ulp")
    assert plain["exit_code"] == 0
    (row,) = plain["rows"]
    assert (row["status"], row["check"], row["what"]) == ("detected", "state", "diverged")
    assert (row["planted_step"], row["detected_step"], row["planted_rank"]) == (3, 3, 1)
    assert row["location"]["step"] == 3
    assert (len(plain["clean"]), plain["alarms"]) == (3, [])
    assert plain["rates"]["detected"]["successes"] == 1
    made = Path("made")
    assert json.loads((made / "matrix.json").read_text())["rows"] == plain["rows"]
    assert "| ulp |" in (made / "matrix.md").read_text()


def test_a_fault_that_nobody_sees_ends_with_1(plants: FakeEngine, cli: Cli) -> None:
    """A planted fault without a word is a failure of the harness, said as such."""
    plain = cli.json("faults", *RAN, "ulp", "nan", code=1)
    status = {row["fault"]: row["status"] for row in plain["rows"]}
    assert status == {"ulp": "detected", "nan": "missed"}
    assert plain["rates"]["detected"]["successes"] == 1


def test_a_clean_case_that_fails_ends_with_1(plants: FakeEngine, cli: Cli) -> None:
    """A false alarm is a failure, and named."""
    quiet = plants.spoil

    def noisy(spec: RunSpec, record: StepRecord) -> StepRecord:
        record = quiet(spec, record)
        is_quiet = not spec.config["stress"] or spec.plant is not None
        return record if is_quiet else other_bits(record, "grads")

    plants.spoil = noisy
    plain = cli.json("faults", *RAN, "ulp", code=1)
    assert plain["alarms"]
    assert plain["rates"]["false alarms on clean cases"]["successes"] == len(plain["alarms"])


def test_faults_of_other_devices_are_not_run_and_not_counted(plants: FakeEngine, cli: Cli) -> None:
    """Alone they end with 5: nothing ran, so nothing may pass."""
    plain = cli.json("faults", "run", "illegal_access", "--device", "cpu", code=5)
    (row,) = plain["rows"]
    assert row["status"] == "not run"
    assert "cuda" in row["reason"]
    assert plain["rates"]["detected"]["trials"] == 0


def test_a_matrix_that_was_finished_is_the_same_when_resumed(plants: FakeEngine, cli: Cli) -> None:
    """Everything is read back from the folder; no run is made again."""
    first = cli.json("faults", *RAN, "ulp", "illegal_access")
    made = list(plants.made)
    again = cli.json("faults", "run", "--resume", "made")
    assert plants.made == made
    for plain in (first, again):
        del plain["wall_s"], plain["exit_code"]
    assert again == first


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "ulpp"), 4, "did you mean ulp?"),
        (("run", "earlyrelease"), 4, "did you mean early_release?"),
        (("list", "-k", "zzz"), 5, "selects none"),
        (("run", "--resume", "nowhere", "--clean", "3"), 4, "expected no names"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    cli: Cli, words: tuple[str, ...], code: int, said: str
) -> None:
    """Expected and got, the nearest name, and exit code 4 or 5."""
    assert said in cli.refused("faults", *words, code=code)


def test_the_list_has_every_fault(cli: Cli) -> None:
    """All of them, or those whose name, class, source, words or stressors match."""
    assert [entry["name"] for entry in cli.json("faults", "list")] == list(CATALOGUE)
    some = cli.json("faults", "list", "-k", "streams and races")
    assert some
    assert {entry["kind"] for entry in some} == {"streams"}
    shown = cli("faults", "list").out
    assert all(name in shown for name in CATALOGUE)


def test_an_entry_is_shown_with_a_scenario_that_runs(
    plants: FakeEngine, cli: Cli, tmp_path: Path
) -> None:
    """What `show` prints is a file for `harness run`."""
    shown = cli("faults", "show", "ulp").out
    assert cli.json("faults", "show", "ulp")["scenario"] in shown
    file = tmp_path / "shown.yaml"
    file.write_text(shown)  # with the comments
    cli("run", str(file), "--no-history", "--device", "cpu", code=1)
