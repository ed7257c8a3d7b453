"""Contracts of harness.scenario.matrix and harness.scenario.case_id."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from harness.errors import NothingSelected, ScenarioError
from harness.plant_spec import PlantSpec, each_of
from harness.records import CaseSpec
from harness.repeats import NUM_SAMPLES, samples_of
from harness.scenario.case_id import MAX_ID_CHARS
from harness.scenario.matrix import count, named
from harness.scenario.schema import load_scenario
from tests.unit.harness.scenario.small_scenario import DPS, GRAPHS, cases, ids


def test_axes_multiply_and_the_reference_is_no_case(tmp_path: Path) -> None:
    """Every combination but the reference value is a case, in the order of the file."""
    assert ids(tmp_path) == ["dp2-attn", "dp2-full_iteration", "dp4-attn", "dp4-full_iteration"]


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


def test_cases_share_their_reference(tmp_path: Path) -> None:
    """Cases that differ in the compared axis only have one reference run between them."""
    first, second, *_ = cases(tmp_path)
    assert first.reference.key == second.reference.key
    assert first.control.key == second.control.key


def test_exclude_removes_what_matches_in_part(tmp_path: Path) -> None:
    """An entry that names one axis removes all its cases; one that names two, one case."""
    assert ids(tmp_path, exclude=[{"graph": ["attn"]}]) == [
        "dp2-full_iteration", "dp4-full_iteration",
    ]  # fmt: skip
    assert ids(tmp_path, exclude=[{"graph": ["attn"], "parallel": {"dp": 2}}]) == [
        "dp2-full_iteration", "dp4-attn", "dp4-full_iteration",
    ]  # fmt: skip


def test_include_extends_the_cases_that_agree_in_both_legs(tmp_path: Path) -> None:
    """Other settings of an entry go into candidate and reference of the cases that it fits."""
    found = cases(tmp_path, include=[{"parallel": {"dp": 4}, "steps": 9}])
    steps = {case.id: (case.candidate.config["steps"], case.reference.config["steps"])
             for case in found}  # fmt: skip
    assert steps == {
        "dp2-attn": (4, 4), "dp2-full_iteration": (4, 4),
        "dp4-steps9-attn": (9, 9), "dp4-steps9-full_iteration": (9, 9),
    }  # fmt: skip


def test_include_without_axes_extends_every_case(tmp_path: Path) -> None:
    """An entry that names no axis fits all; a later entry wins over an earlier one."""
    found = cases(tmp_path, include=[{"steps": 5}, {"steps": 6, "graph": ["attn"]}])
    assert [case.candidate.config["steps"] for case in found] == [6, 5, 6, 5]


def test_include_adds_what_no_case_agrees_with(tmp_path: Path) -> None:
    """An entry that fits no case is a case of its own, with values that need not be on the axis."""
    found = cases(tmp_path, include=[{"parallel": {"dp": 16}, "graph": ["attn"]}])
    assert found[-1].id == "dp16-attn"
    assert len(found) == 5
    assert found[-1].reference.world_size == 16


def test_include_brings_back_what_exclude_removed(tmp_path: Path) -> None:
    """Exclude comes first."""
    found = ids(
        tmp_path,
        exclude=[{"parallel": {"dp": 2}}],
        include=[{"parallel": {"dp": 2}, "graph": ["attn"]}],
    )
    assert found == ["dp4-attn", "dp4-full_iteration", "dp2-attn"]


def test_include_does_not_extend_cases_that_include_added(tmp_path: Path) -> None:
    """Entries see the cases of the product only."""
    added = {"parallel": {"dp": 16}, "graph": ["attn"]}
    found = cases(tmp_path, include=[added, {"seed": 7}])
    assert [case.candidate.config["seed"] for case in found] == [7, 7, 7, 7, 1234]


def test_nothing_left_is_not_a_pass(tmp_path: Path) -> None:
    """A matrix without a case is an error of its own kind."""
    with pytest.raises(NothingSelected, match="exclude leaves no case"):
        ids(tmp_path, exclude=[{"parallel": {"dp": 2}}, {"parallel": {"dp": 4}}])


def test_candidate_and_reference_may_not_be_the_same_run(tmp_path: Path) -> None:
    """A comparison of a run with itself proves nothing and is refused."""
    with pytest.raises(ScenarioError, match="a value that changes the run"):
        ids(
            tmp_path,
            axes={"parallel": [{"dp": 2}, {"dp": 2, "tp": 1}]},
            compare={"axis": "parallel", "reference": {"dp": 2}, "expect": "bitwise"},
        )


@pytest.mark.parametrize("axis", ["steps", "microbatches"])
def test_legs_must_pair_up(axis: str, tmp_path: Path) -> None:
    """Legs whose records have no partners are refused before anything runs."""
    with pytest.raises(ScenarioError, match="to compare one to one"):
        ids(
            tmp_path,
            axes={axis: [3, 4]},
            compare={"axis": axis, "reference": 3, "expect": "bitwise"},
        )


def test_compiled_legs_are_compared_with_compiled_ones(tmp_path: Path) -> None:
    """Compiled code is another program than its Python, and another than other compilers'."""
    with pytest.raises(ScenarioError, match="compiled parts, none, to compare one to one, got mlp"):
        ids(
            tmp_path,
            axes={"compile": ["none", ["mlp"]]},
            compare={"axis": "compile", "reference": "none", "expect": "bitwise"},
        )
    both = {"compile": ["none", ["mlp"]], "graph": ["eager", ["attn"]]}
    assert ids(tmp_path, axes=both) == ["no_compile-attn", "compile_mlp-attn"]


def test_compiled_code_may_be_compared_within_a_tolerance(tmp_path: Path) -> None:
    """Where bits are not due, a compiled candidate has an eager reference."""
    for expect in ("rounding", {"rtol": 1e-5}):
        compare = {"axis": "compile", "reference": "none", "expect": expect}
        assert ids(
            tmp_path, base={"compile_backend": "aot_eager"}, compare=compare,
            axes={"compile": ["none", ["mlp"]]},
        ) == ["compile_mlp"]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"graph": ["attn"]}, "graph none, for rounding to be measured, got .*attn"),
        ({"compile": ["mlp"]}, "compile none, for rounding to be measured, got .*mlp"),
        ({"backend": "te"}, "backend torch, for rounding to be measured, got te"),
    ],
)
def test_a_reference_that_cannot_round_at_random_is_refused(
    tmp_path: Path, base: dict[str, Any], expected: str
) -> None:
    """Replays and compiled kernels round as they do: one line says what is expected instead."""
    compare = {"axis": "seed", "reference": 1, "expect": "rounding"}
    with pytest.raises(
        ScenarioError, match=rf"compare\.expect: expected a reference with {expected}"
    ):
        ids(tmp_path, base=base, axes={"seed": [1, 2]}, compare=compare)


def test_samples_are_the_reference_but_for_what_decides_no_loss(tmp_path: Path) -> None:
    """Six seeds of one configuration, and more time; a planted fault of the reference stays."""
    compare = {"axis": "compile", "reference": "none", "expect": "rounding"}
    (case,) = cases(
        tmp_path, axes={"compile": ["none", ["mlp"]]}, compare=compare,
        base={"plant": {"fault": "ulp", "step": 3, "legs": ["reference", "control"]},
              "taps": ["layers.*"], "stress": ["jitter"]},
    )  # fmt: skip
    samples = samples_of(case)
    assert [spec.rounding for spec in samples] == list(range(1, NUM_SAMPLES + 1))
    for spec in samples:
        assert spec.config == case.reference.config | {"taps": [], "stress": []}
        assert (spec.plant, spec.world_size) == (case.reference.plant, case.reference.world_size)
        assert spec.timeout_s > case.reference.timeout_s


def test_a_plant_goes_into_the_candidate_alone(tmp_path: Path) -> None:
    """The reference and the control stay clean unless the plant names them."""
    case = cases(tmp_path, base={"plant": {"fault": "ulp", "step": 3}})[0]
    assert case.candidate.plant == PlantSpec(fault="ulp", step=3)
    assert case.reference.plant is None
    assert case.control.plant is None


def test_a_plant_goes_into_the_legs_it_names(tmp_path: Path) -> None:
    """`legs` says where, and nowhere else."""
    plant = {"fault": "nan", "step": 3, "legs": ["control"]}
    case = cases(tmp_path, base={"plant": plant})[0]
    assert [run.plant is not None for run in (case.reference, case.control, case.candidate)] == [
        False, True, False,
    ]  # fmt: skip


def test_negative_zero_has_positive_zero_in_the_other_legs(tmp_path: Path) -> None:
    """The legs differ in the sign of a zero and in nothing else."""
    plant = {"fault": "negative_zero", "step": 2, "rank": 1, "tensor": "x"}
    case = cases(tmp_path, base={"plant": plant})[0]
    faults = [
        run.plant.fault if run.plant else ""
        for run in (case.reference, case.control, case.candidate)
    ]
    assert faults == ["positive_zero", "positive_zero", "negative_zero"]
    assert case.reference.plant is not None
    assert (case.reference.plant.step, case.reference.plant.tensor) == (2, "x")


def test_each_fault_of_several_goes_where_it_says(tmp_path: Path) -> None:
    """Faults planted together keep legs of their own, and counterparts of their own."""
    plant = [
        {"fault": "negative_zero", "step": 2},
        {"fault": "ulp", "step": 3, "legs": ["candidate", "control"]},
    ]
    case = cases(tmp_path, base={"plant": plant})[0]
    legs = (case.reference, case.control, case.candidate)
    assert [[fault.fault for fault in each_of(run.plant)] for run in legs] == [
        ["positive_zero"], ["ulp", "positive_zero"], ["negative_zero", "ulp"],
    ]  # fmt: skip


def test_a_plant_can_be_the_compared_axis(tmp_path: Path) -> None:
    """A planted run against the clean one: ids name the fault."""
    plants = [None, {"fault": "ulp", "step": 3}, {"fault": "hang", "step": 1, "rank": "last"}]
    found = cases(
        tmp_path,
        axes={"plant": plants},
        compare={"axis": "plant", "reference": "none", "expect": "bitwise"},
    )
    assert [case.id for case in found] == ["ulp_s3_rlast", "hang_s1_rlast"]
    flaky = {"fault": "hang", "step": 1, "rank": "last", "chance": 0.3}
    several = [None, [plants[1], flaky]]
    (case,) = cases(
        tmp_path,
        axes={"plant": several},
        compare={"axis": "plant", "reference": "none", "expect": "bitwise"},
    )
    assert case.id == "ulp_s3_rlast+hang_s1_rlast_p0.3"
    assert all(case.reference.plant is None for case in found)


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        ("seed", [1, 2], ["seed1-attn", "seed2-attn"]),
        ("optim.lr", [0.1, 1e-5], ["lr0.1-attn", "lr1e-05-attn"]),
        ("dtype", ["bf16", "fp32"], ["bf16-attn", "fp32-attn"]),
        ("fsdp.strategy", ["optim_grads"], ["optim_grads-attn"]),
        ("fsdp.reshard_after_forward", [True, False],
         ["reshard_after_forward-attn", "no_reshard_after_forward-attn"]),
        ("model", ["dense_small", {"preset": "dense_tiny", "layers": 3}],
         ["dense_small-attn", "dense_tiny_layers3-attn"]),
        ("data", [{"kind": "text"}], ["kind_text-attn"]),
        ("fsdp", [{"pool": "double", "strategy": "no_shard"}], ["no_shard_pool_double-attn"]),
    ],
)  # fmt: skip
def test_ids_are_readable(
    axis: str, values: list[Any], expected: list[str], tmp_path: Path
) -> None:
    """Each kind of value has a short form that a person recognises."""
    assert ids(tmp_path, axes={axis: values, "graph": ["eager", ["attn"]]}) == expected


def test_the_compared_axis_comes_last_and_parallel_first(tmp_path: Path) -> None:
    """`dp2_dp_outer4-optim_grads-attn`, whatever the order in the file."""
    axes = {"graph": ["eager", ["attn"]], "fsdp.strategy": ["optim_grads"],
            "parallel": [{"dp_outer": 4, "dp": 2}]}  # fmt: skip
    assert ids(tmp_path, axes=axes) == ["dp2_dp_outer4-optim_grads-attn"]


def test_paths_cannot_leave_the_folder(tmp_path: Path) -> None:
    """Characters that mean something to a file system are replaced, and the ids stay distinct."""
    found = ids(
        tmp_path,
        base={"data.kind": "text"},
        axes={"data.path": ["../a b", "..%a b", "../a*b"], "graph": ["eager", ["attn"]]},
    )
    assert len(set(found)) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9._+=-]+", name) for name in found)


def test_ids_that_differ_in_case_only_are_told_apart(tmp_path: Path) -> None:
    """Two cases never share a folder on a file system that ignores letter case."""
    found = ids(
        tmp_path,
        base={"data.kind": "text"},
        axes={"data.path": ["a", "A"], "graph": ["eager", ["attn"]]},
    )
    assert len({name.casefold() for name in found}) == 2


def test_long_ids_are_cut_and_stay_unique(tmp_path: Path) -> None:
    """An id that would be too long for a file name ends in a hash of what it holds."""
    values = ["x" * 300 + "1", "x" * 300 + "2"]
    found = ids(
        tmp_path,
        base={"data.kind": "text"},
        axes={"data.path": values, "graph": ["eager", ["attn"]]},
    )
    assert all(len(name) <= MAX_ID_CHARS for name in found)
    assert len(set(found)) == 2


AXES = st.fixed_dictionaries(
    {"graph": st.just(GRAPHS)},
    optional={
        "parallel": st.lists(st.sampled_from([{"dp": n} for n in (1, 2, 4, 8)]),
                             min_size=1, max_size=3, unique_by=str),
        "seed": st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
        "steps": st.lists(st.integers(3, 9), min_size=1, max_size=3, unique=True),
        "optim.lr": st.lists(st.sampled_from([1, 0.1, 1e-5, 2.5]), min_size=1, unique=True),
        "dtype": st.permutations(["bf16", "fp32"]),
        "fsdp": st.lists(st.sampled_from([{"pool": "double"}, {"pool": "double",
                         "reduce_dtype": "bf16"}, {"reduce_dtype": "bf16"}]),
                         min_size=1, max_size=3, unique_by=str),
    },
)  # fmt: skip


def _distinct(axes: dict[str, Any]) -> int:
    """How many cases a product must give; 0 if two of its combinations are the same run."""
    fsdp = axes.get("fsdp", [{}])
    full = [{"pool": "double", "reduce_dtype": "fp32"} | value for value in fsdp]
    if len({json.dumps(value, sort_keys=True) for value in full}) < len(fsdp):
        return 0
    count = len(GRAPHS) - 1
    for name, values in axes.items():
        count *= len(values) if name != "graph" else 1
    return count


@hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(axes=AXES, random=st.randoms(use_true_random=False))
def test_ids_are_unique_and_blind_to_order(
    tmp_path: Path, axes: dict[str, Any], random: Any
) -> None:
    """Shuffling mapping keys and axis values changes the order of cases, never an id or a run."""
    expected = _distinct(axes)
    if not expected:
        with pytest.raises(ScenarioError, match="each case once"):
            cases(tmp_path, axes=axes)
        return
    first = cases(tmp_path, axes=axes)
    assert len({case.id for case in first}) == len(first) == expected
    names = list(axes)
    random.shuffle(names)
    shuffled = {}
    for name in names:
        values = [
            dict(reversed(value.items())) if isinstance(value, dict) else value
            for value in axes[name]
        ]
        random.shuffle(values)
        shuffled[name] = values
    second = cases(tmp_path, axes=shuffled)
    assert {case.id: case.candidate.key for case in first} == {
        case.id: case.candidate.key for case in second
    }


@hypothesis_settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_exclude_takes_away_exactly_what_it_matches(tmp_path: Path, data: st.DataObject) -> None:
    """The cases left are those of the product that no entry matches, counted another way."""
    seeds, steps = [1, 2, 3], [4, 5]
    axes = {"seed": seeds, "steps": steps, "graph": GRAPHS}
    rule = st.fixed_dictionaries(
        {},
        optional={"seed": st.sampled_from(seeds), "steps": st.sampled_from(steps),
                  "graph": st.sampled_from(GRAPHS[1:])},
    ).filter(bool)  # fmt: skip
    rules = data.draw(st.lists(rule, max_size=3))
    product = [
        {"seed": seed, "steps": step, "graph": graph}
        for seed, step, graph in itertools.product(seeds, steps, GRAPHS[1:])
    ]
    left = [
        held for held in product
        if not any(all(held[name] == value for name, value in rule.items()) for rule in rules)
    ]  # fmt: skip
    if not left:
        with pytest.raises(NothingSelected):
            cases(tmp_path, axes=axes, exclude=rules)
        return
    found = cases(tmp_path, axes=axes, exclude=rules)
    assert [
        {"seed": c.candidate.config["seed"], "steps": c.candidate.config["steps"],
         "graph": c.candidate.config["graph"]}
        for c in found
    ] == left  # fmt: skip


def test_an_id_does_not_depend_on_other_cases(tmp_path: Path) -> None:
    """Taking a value off an axis keeps the ids of the cases that stay."""
    whole = set(ids(tmp_path))
    assert set(ids(tmp_path, axes={"parallel": DPS[1:], "graph": GRAPHS})) < whole


def test_a_compared_plant_has_its_counterpart_in_the_reference(tmp_path: Path) -> None:
    """With plants as the compared axis too, a negative zero is compared with a positive one."""
    plants = [None, {"fault": "ulp", "step": 1}, {"fault": "negative_zero", "step": 1}]
    compare = {"axis": "plant", "reference": None, "expect": "bitwise"}
    found = cases(tmp_path, axes={"plant": plants}, compare=compare)
    assert [case.reference.plant and case.reference.plant.fault for case in found] == [
        None, "positive_zero",
    ]  # fmt: skip
    assert found[0].reference.key != found[1].reference.key


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ({"compile": ["none", ["mlp", "attn"]]},
         {"no_compile-attn": "none", "compile_attn+mlp-attn": "attn+mlp"}),
        ({"stress": ["none", ["jitter", "poison"]]},
         {"no_stress-attn": "none", "stress_jitter+poison-attn": "jitter+poison"}),
    ],
)  # fmt: skip
def test_nothing_of_a_kind_is_called_none(
    values: dict[str, Any], labels: dict[str, str], tmp_path: Path
) -> None:
    """In labels and ids, not by the word for no graph."""
    (name,) = values
    found = cases(tmp_path, axes={"graph": ["eager", ["attn"]]} | values)
    assert {case.id: case.labels[name] for case in found} == labels


def test_a_count_is_the_number_of_cases() -> None:
    """Whatever axes, exclude and include entries a file has."""
    ruled = 0
    for path in sorted((Path(__file__).parents[4] / "scenarios").rglob("*.yaml")):
        scenario = load_scenario(path)
        if (number := count(scenario)) < 5000:
            assert number == sum(1 for _ in named(scenario)), path
            ruled += bool(scenario.exclude) + bool(scenario.include)
    assert ruled > 10
