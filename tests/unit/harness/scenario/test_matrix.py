"""Which cases, runs and legal layouts a scenario has, and their names."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fsdp_core.config import (
    DEGREES,
    SCOPES,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    divisors,
    model_from_preset,
)
from harness.errors import NothingSelected, ScenarioError
from harness.records import CaseSpec, each_of
from harness.repeats import NUM_SAMPLES, samples_of
from harness.scenario.matrix import MAX_ID_CHARS, count, expand
from harness.scenario.schema import MAX_RANKS, Overrides, legal_layouts, load_scenario
from harness.scenario.suite import find_scenarios
from tests.support.fake_engine import Patch
from tests.unit.harness.scenario.small_scenario import DPS, GRAPHS, cases, ids

SCENARIOS = Path(__file__).parents[4] / "scenarios"
LAYOUTS = SCENARIOS / "nightly" / "layouts_of_64.yaml"
TWO = {"graph": ["eager", ["attn"]]}
TEXT = {"base": {"data.kind": "text"}}


def compare(axis: str, reference: Any, expect: Any = "bitwise") -> dict[str, Any]:
    return {"axis": axis, "reference": reference, "expect": expect}


LEGAL = Path(__file__).parent / "legal.yaml"


@pytest.mark.parametrize("path", find_scenarios([LEGAL]), ids=lambda path: path.name)
def test_which_cases_there_are(path: Path) -> None:
    """Axes multiply, exclude removes, include adds; ids are readable, and in the file's order."""
    scenario = load_scenario(path)
    expected = scenario.source.decode().partition("\n")[0].removeprefix("# ").split()
    assert [case.id for case in expand(scenario, "cpu")] == expected


def test_the_three_runs_of_a_case(tmp_path: Path) -> None:
    """Candidate and reference differ in the compared axis alone; the control is the reference."""
    case = cases(tmp_path)[0]
    assert case.candidate.config | {"graph": []} == case.reference.config
    assert case.candidate.config["graph"] == ["attn"]
    assert (case.reference.replica, case.control.replica, case.candidate.replica) == (0, 1, 0)
    assert case.control.config == case.reference.config
    assert case.control.key != case.reference.key
    assert {run.world_size for run in (case.reference, case.control, case.candidate)} == {2}
    assert case.labels == {"parallel": "dp2", "graph": "attn"}
    assert CaseSpec.from_json(case.to_json()) == case


def test_include_extends_the_cases_that_agree_in_both_legs(tmp_path: Path) -> None:
    """Those of the product only, in candidate and reference; a later entry wins."""
    added = {"parallel": {"dp": 16}, "graph": ["attn"]}
    include = [{"steps": 5}, {"parallel": {"dp": 4}, "steps": 9}, added]
    found = {c.id: (c.candidate.config["steps"], c.reference.config["steps"])
             for c in cases(tmp_path, include=include)}  # fmt: skip
    assert found == {
        "dp2-steps5-attn": (5, 5), "dp2-steps5-full_iteration": (5, 5),
        "dp4-steps9-attn": (9, 9), "dp4-steps9-full_iteration": (9, 9), "dp16-attn": (4, 4),
    }  # fmt: skip


def test_samples_are_the_reference_but_for_what_decides_no_loss(tmp_path: Path) -> None:
    """Six seeds of one configuration, and more time; a planted fault of the reference stays."""
    plant = {"fault": "ulp", "step": 3, "legs": ["reference", "control"]}
    (case,) = cases(
        tmp_path, axes={"compile": ["none", ["mlp"]]},
        compare=compare("compile", "none", "rounding"),
        base={"plant": plant, "taps": ["layers.*"], "stress": ["jitter"],
              "resume_at": 2},
    )  # fmt: skip
    config = case.reference.config | {"taps": [], "stress": [], "resume_at": 0}
    for number, spec in enumerate(samples_of(case), 1):
        assert (spec.rounding, spec.config, spec.plant) == (number, config, case.reference.plant)
        assert spec.timeout_s > case.reference.timeout_s
    assert len(samples_of(case)) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("plant", "legs"),
    [
        ({"fault": "ulp", "step": 3}, [[], [], ["ulp"]]),
        ({"fault": "nan", "step": 3, "legs": ["control"]}, [[], ["nan"], []]),
        ({"fault": "negative_zero", "step": 2},
         [["positive_zero"], ["positive_zero"], ["negative_zero"]]),
        ([{"fault": "negative_zero", "step": 2},
          {"fault": "ulp", "step": 3, "legs": ["candidate", "control"]}],
         [["positive_zero"], ["ulp", "positive_zero"], ["negative_zero", "ulp"]]),
    ],
)  # fmt: skip
def test_faults_go_where_they_say(plant: Any, legs: list[list[str]], tmp_path: Path) -> None:
    """Into reference, control and candidate; other legs get the counterpart, if there is one."""
    case = cases(tmp_path, base={"plant": plant})[0]
    runs = (case.reference, case.control, case.candidate)
    assert [[fault.fault for fault in each_of(run.plant)] for run in runs] == legs


def test_a_compared_plant_has_its_counterpart_in_the_reference(tmp_path: Path) -> None:
    """With plants as the compared axis too, a negative zero is compared with a positive one."""
    plants = [None, {"fault": "ulp", "step": 1}, {"fault": "negative_zero", "step": 1}]
    found = cases(tmp_path, axes={"plant": plants}, compare=compare("plant", None))
    faults = [[fault.fault for fault in each_of(case.reference.plant)] for case in found]
    assert faults == [[], ["positive_zero"]]
    assert found[0].reference.key != found[1].reference.key


@pytest.mark.parametrize(
    "paths", [["../a b", "..%a b", "../a*b"], ["a", "A"], ["x" * 300 + "1", "x" * 300 + "2"]]
)
def test_ids_are_safe_and_differ(paths: list[str], tmp_path: Path) -> None:
    """On file systems that ignore case, too; long ones end in a hash of what they hold."""
    found = ids(tmp_path, axes={"data.path": paths} | TWO, **TEXT)
    assert len({name.casefold() for name in found}) == len(paths)
    assert all(re.fullmatch(rf"[A-Za-z0-9._+=-]{{1,{MAX_ID_CHARS}}}", name) for name in found)


def test_ids_are_blind_to_order(tmp_path: Path) -> None:
    """Other orders of keys and values change the order of cases, never an id or a run."""
    fsdp = [{"pool": "double", "reduce_dtype": "bf16"}, {"reduce_dtype": "bf16"}]
    axes: dict[str, list[Any]] = {
        "parallel": DPS, "seed": [3, 1], "optim.lr": [1, 0.1, 1e-5], "dtype": ["bf16", "fp32"],
        "fsdp": fsdp[1:], "steps": [4, 3], "graph": GRAPHS,
    }  # fmt: skip
    other = {name: list(reversed(values)) for name, values in reversed(axes.items())}
    first, second = (cases(tmp_path, axes=each) for each in (axes, other))
    assert len({case.id for case in first}) == len(first) == 2 * 2 * 3 * 2 * 2 * 2
    keys = [{case.id: case.candidate.key for case in found} for found in (first, second)]
    assert keys[0] == keys[1]
    fewer = cases(tmp_path, axes=axes | {"seed": [3]})  # an id does not depend on other cases
    assert {case.id for case in fewer} < {case.id for case in first}
    with pytest.raises(ScenarioError, match="each case once"):  # double is the default
        cases(tmp_path, axes={"fsdp": fsdp, "graph": GRAPHS})


RULED = {"seed": [1, 2, 3], "steps": [4, 5], "graph": GRAPHS}
CHOSEN = {name: st.sampled_from(each) for name, each in (RULED | {"graph": GRAPHS[1:]}).items()}
RULE = st.fixed_dictionaries({}, optional=CHOSEN)


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules=st.lists(RULE.filter(bool), max_size=3))
def test_exclude_takes_away_exactly_what_it_matches(tmp_path: Path, rules: list[Any]) -> None:
    """The cases left are those of the product that no entry matches, counted another way."""
    product = itertools.product(RULED["seed"], RULED["steps"], GRAPHS[1:])
    left = [
        held for held in (dict(zip(RULED, values, strict=True)) for values in product)
        if not any(rule.items() <= held.items() for rule in rules)
    ]  # fmt: skip
    if not left:
        with pytest.raises(NothingSelected):
            cases(tmp_path, axes=RULED, exclude=rules)
        return
    configs = [case.candidate.config for case in cases(tmp_path, axes=RULED, exclude=rules)]
    assert [{name: config[name] for name in RULED} for config in configs] == left


def test_a_count_is_the_number_of_cases() -> None:
    """Whatever axes, exclude and include entries a file has."""
    ruled = 0
    for path in find_scenarios([SCENARIOS]):
        scenario = load_scenario(path)
        if (number := count(scenario)) < 5000:
            assert number == len(expand(scenario, "cpu")), path
            ruled += bool(scenario.exclude) + bool(scenario.include)
    assert ruled > 10


def layouts(found: tuple[CaseSpec, ...]) -> list[ParallelConfig]:
    """The layout of each case."""
    plain = [case.candidate.config["parallel"] for case in found]
    return [ParallelConfig(**p | {"dynamic_cp": tuple(p["dynamic_cp"])}) for p in plain]


def listed(folder: Path, options: Overrides, **sections: Any) -> tuple[CaseSpec, ...]:
    """The cases of an axis of legal layouts of 8 ranks."""
    axes = {"parallel": {"legal_layouts": 8}} | TWO
    cases(folder, **{"axes": axes} | sections)
    return expand(load_scenario(folder / "case.yaml", overrides=options), "cpu")


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny"])
def test_every_legal_layout_is_a_value(preset: str, tmp_path: Path) -> None:
    """In the order of the rules, for the model as it is, `--set` over the file included."""
    found = listed(tmp_path, Overrides(), base={"steps": 4, "model": preset})
    assert layouts(found) == list(legal_layouts(8, model_from_preset(preset)))
    assert len({case.id for case in found}) == len(found)
    if preset == "dense_tiny":
        wide = listed(tmp_path, Overrides(sets=("model={kv_heads: 4}",)))
        assert [max(p.tp for p in layouts(each)) for each in (found, wide)] == [2, 4]


def test_keys_and_microbatches_restrict_it(tmp_path: Path) -> None:
    """A field with a value, or a list, has no other; two chunks need rounds of pp microbatches."""
    axis = {"legal_layouts": 8, "tp": [1, 2], "dp_outer": 1, "sequence_parallel": False}
    found = layouts(listed(tmp_path, Overrides(), axes={"parallel": axis} | TWO))
    whole = legal_layouts(8, model_from_preset("dense_tiny"))
    assert found == [p for p in whole if p.dp_outer == 1 and not p.sequence_parallel]
    axis = {"legal_layouts": 8, "pp_chunks": [1, 2]}
    base = {"steps": 4, "model": {"layers": 8}, "microbatches": 2}
    found = layouts(listed(tmp_path, Overrides(), axes={"parallel": axis} | TWO, base=base))
    assert {p.pp for p in found if p.pp_chunks == 2} == {2}
    assert {p.pp for p in found if p.pp_chunks == 1} == {1, 2, 4, 8}


def test_too_many_layouts_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    """The list is cut short before it fills the memory, and the limit is said."""
    for size in (0, MAX_RANKS + 1):
        with pytest.raises(ScenarioError) as caught:
            listed(tmp_path, Overrides(axes=(f"parallel={{legal_layouts: {size}}}",)))
        assert caught.value.key == "axes.parallel.legal_layouts"
    monkeypatch.setattr("harness.scenario.schema.MAX_LAYOUTS", 33)
    with pytest.raises(ScenarioError, match=r"axes\.parallel: expected at most 33 layouts"):
        listed(tmp_path, Overrides())


ABOUT: dict[str, tuple[str, set[str]]] = {
    # file: (model, scopes that none of its layouts can have)
    "layouts_dense": ("qwen3_8b", {"moe_router", "moe_preprocess", "moe"}),
    "layouts_dense_llama3": ("llama3_8b", {"moe_router", "moe_preprocess", "moe"}),
    "layouts_dynamic_cp": ("moonlight_16b_a3b", {"full_iteration"}),
    "layouts_mla_moe": ("moonlight_16b_a3b", set()),
    "layouts_moe": ("qwen3_30b_a3b", {"mlp"}),
    "layouts_moe_dropless": ("qwen3_30b_a3b", {"mlp", "moe", "layer", "full_iteration"}),
}


@pytest.mark.parametrize("name", ABOUT)
def test_nightly_files_have_every_layout_and_scope(name: str) -> None:
    """A nightly file is all legal layouts of its model times each scope that the model can have."""
    path = f"{LAYOUTS}::{name}"
    dynamic = ", cp: 1, dynamic_cp: [1, 2]" if "dynamic" in name else ""
    option = Overrides(axes=(f"parallel={{legal_layouts: 8{dynamic}}}",))
    found = expand(load_scenario(path, overrides=option), "cpu")
    preset, impossible = ABOUT[name]
    model = found[0].candidate.config["model"]
    assert model["preset"] == preset
    scopes = {scope for case in found for scope in case.candidate.config["graph"]}
    assert scopes == set(SCOPES) - impossible
    if not dynamic:
        own = model_from_preset(preset)
        assert dict.fromkeys(layouts(found)) == dict.fromkeys(legal_layouts(8, own))


def test_the_scenarios_of_8_hold_every_layout_and_scope() -> None:
    """DP8, TP2 x DP4, EP2 x ETP2, both with TP2, EP8, CP8, dynamic CP 1/2/4/8, TP2 x PP2 x DP2."""
    paths = find_scenarios([SCENARIOS / "nightly" / "alignment_of_8.yaml"])
    held = [case for path in paths for case in expand(load_scenario(path), "cuda")]
    configs = [case.candidate.config for case in held]
    degrees = ("dp", "tp", "ep", "etp", "cp", "pp")
    found = {
        (*(c["parallel"][n] for n in degrees), tuple(c["parallel"]["dynamic_cp"]), c["backend"])
        for c in configs if c["model"]["experts"]
    }  # fmt: skip
    due = {
        (8, 1, 1, 1, 1, 1, ()), (4, 2, 1, 2, 1, 1, ()), (8, 1, 2, 2, 1, 1, ()),
        (4, 2, 2, 2, 1, 1, ()), (8, 1, 8, 1, 1, 1, ()), (1, 1, 1, 1, 8, 1, ()),
        (8, 1, 1, 1, 1, 1, (1, 2, 4, 8)), (2, 2, 1, 2, 1, 2, ()),
    }  # fmt: skip
    assert found == {(*layout, backend) for layout in due for backend in ("torch", "te")}
    scopes = {(scope, config["backend"]) for config in configs for scope in config["graph"]}
    assert scopes == {(scope, backend) for scope in SCOPES for backend in ("torch", "te")}
    assert {(c.candidate.world_size, c.candidate.config["steps"]) for c in held} == {(8, 100)}
    assert all({"loss", "state", "finite", "peak_memory"} <= set(c.checks) for c in held)


AT_ONCE = """\
import sys
from harness.cli import main
from tests.pace import in_paces
codes = []
paces = in_paces(lambda: codes.append(main(sys.argv[1:])), times=1)
print(codes[0], paces, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("args", "said", "limit"),
    [
        # Some 95,000 cases of 64 ranks
        (("list", "--count", str(LAYOUTS)), r"\d\d,\d{3} cases in 6 scenarios", 20),
        # 3,000 candidates, 1,500 references, each of these twice
        (("run", "--dry-run", "--device", "cpu", "--slots", "8", "case"),
         r"3,000 cases, 6,000 runs on 8 slots, about ", 27),
    ],
)  # fmt: skip
def test_a_laptop_lists_and_plans_at_once_without_torch(
    args: tuple[str, ...], said: str, limit: int, tmp_path: Path
) -> None:
    """All nightly files, and a matrix of 3,000 cases: torch is not imported; 14 paces measured."""
    axes = {"seed": list(range(100)), "steps": list(range(3, 18)), "graph": GRAPHS}
    cases(tmp_path, axes={"seed": [1], "graph": GRAPHS})
    path = tmp_path / "case.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"axes": axes}))
    command = [str(path) if arg == "case" else arg for arg in args]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SCENARIOS.parent),
                   "HOME": str(tmp_path)}  # fmt: skip
    done = subprocess.check_output(
        [sys.executable, "-c", AT_ONCE, *command], text=True, env=environment, cwd=tmp_path
    )
    *shown, last = done.splitlines()
    exit_code, paces, torch = last.split()
    assert (exit_code, torch) == ("0", "False")
    assert any(re.match(said, line) for line in shown), shown[-3:]
    assert float(paces) < limit


def test_many_rules_on_many_cases_stay_fast(tmp_path: Path) -> None:
    """Excluding is a look-up, not a product of rules and cases."""
    axes = {"seed": list(range(100)), "steps": list(range(3, 53)), "graph": GRAPHS}
    rules = [{"seed": n, "steps": m} for n in range(90) for m in range(3, 13)]
    began = time.process_time()
    assert len(ids(tmp_path, axes=axes, exclude=rules)) == 10_000 - 2 * len(rules)
    assert time.process_time() - began < 8


def by_trial(
    world_size: int, model: ModelConfig, **options: tuple[Any, ...]
) -> set[ParallelConfig]:
    """Legal layouts found by trying every combination of degrees in a whole run."""
    numbers = divisors(world_size)
    found = set()
    for degrees in itertools.product(numbers, repeat=len(DEGREES)):
        chosen = dict(zip(DEGREES, degrees, strict=True))
        dense = math.prod(chosen[axis] for axis in ("dp", "dp_outer", "tp", "cp", "pp"))
        if dense != world_size:
            continue
        for sequence_parallel in (False, True):
            for values in itertools.product(*options.values()):
                fields = chosen | dict(zip(options, values, strict=True))
                try:
                    parallel = ParallelConfig(**fields, sequence_parallel=sequence_parallel)
                    TrainConfig(model=model, parallel=parallel, microbatches=4)
                except ConfigError:
                    continue
                found.add(parallel)
    return found


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny", "mla_moe_tiny", "moonlight_16b_a3b"])
@pytest.mark.parametrize("world_size", [1, 2, 6, 8])
def test_the_list_is_what_trial_finds(preset: str, world_size: int) -> None:
    """Every legal layout is listed, once, and no other: the rules that skip early skip no more."""
    model = model_from_preset(preset)
    listed = list(legal_layouts(world_size, model, microbatches=4))
    assert len(set(listed)) == len(listed)
    assert set(listed) == by_trial(world_size, model)


def test_options_multiply_the_list() -> None:
    """Chunks and dynamic sizes are tried where they are asked for."""
    model = model_from_preset("moe_tiny", {"layers": 4})
    options: dict[str, tuple[Any, ...]] = {"pp_chunks": (1, 2), "dynamic_cp": ((), (1, 2))}
    listed = set(legal_layouts(4, model, microbatches=4, only=options))
    assert listed == by_trial(4, model, **options)
    assert {(p.pp_chunks, p.dynamic_cp) for p in listed} == set(
        itertools.product(*options.values())
    )


@settings(deadline=None)
@given(st.sampled_from(["dense_tiny", "moe_tiny"]), st.sampled_from([4, 8, 12]), st.data())
def test_only_leaves_out_and_nothing_else(preset: str, world_size: int, data: Any) -> None:
    """Restricting a field gives the layouts of the whole list that have one of its values."""
    model = model_from_preset(preset)
    values = st.sets(st.integers(1, 8), min_size=1)
    only = data.draw(st.dictionaries(st.sampled_from(DEGREES), values, max_size=3))
    whole = legal_layouts(world_size, model)
    kept = [p for p in whole if all(getattr(p, name) in only[name] for name in only)]
    assert list(legal_layouts(world_size, model, only=only)) == kept


def test_the_list_is_lazy() -> None:
    """The first of the layouts of a hundred thousand ranks is there at once."""
    began = time.process_time()
    first = next(legal_layouts(2**17, model_from_preset("qwen3_30b_a3b")))
    assert first.world_size == 2**17
    assert time.process_time() - began < 1
