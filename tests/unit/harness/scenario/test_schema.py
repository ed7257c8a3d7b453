"""Contracts of the scenario decoder: positions, typed values, settings, sections, schema."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsdp_core.config import MODEL_PRESETS, ParallelConfig, TrainConfig
from harness.errors import ScenarioError
from harness.records import PlantSpec
from harness.scenario import settings
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, Scenario, load_scenario
from harness.scenario.yaml_source import Origin, parse_bytes, parse_text

ROOT = Path(__file__).parents[4]
SMOKE = ROOT / "scenarios" / "smoke" / "fsdp_cudagraph_alignment.yaml"
LINES = {
    "name": "name: case",
    "why": "why: A sentence.",
    "base": "base: {steps: 4}",
    "axes": "axes: {parallel: [{dp: 2}, {dp: 4}], graph: [eager, [attn]]}",
    "compare": "compare: {axis: graph, reference: eager, expect: bitwise}",
    "checks": "checks: {loss: {}}",
}


def write(folder: Path, **lines: str) -> Path:
    """A scenario file that is right but for the lines given."""
    path = folder / "case.yaml"
    path.write_text("\n".join((LINES | lines).values()) + "\n")
    return path


def load(folder: Path, options: Overrides | None = None, **lines: str) -> Scenario:
    """The scenario of `write`, with options over it."""
    return load_scenario(write(folder, **lines), overrides=options or Overrides())


def value_of(scenario: Scenario, leaf: str) -> Any:
    """The last value that `base` gives a leaf."""
    return [s.value for s in scenario.base if s.leaf == leaf][-1]


def test_the_shipped_smoke_scenario_says_what_it_says() -> None:
    """Every section of the shipped example is decoded, order kept, bytes kept."""
    scenario = load_scenario(SMOKE)
    assert scenario.name == "fsdp_cudagraph_alignment"
    assert scenario.why.startswith("Graphing must not change one bit")
    assert [axis.name for axis in scenario.axes] == ["parallel", "graph"]
    assert [c.leaves["parallel.dp"] for c in scenario.axes[0].choices] == [2, 4, 8]
    assert [c.leaves["graph"] for c in scenario.axes[1].choices] == [
        (), ("attn",), ("full_iteration",),
    ]  # fmt: skip
    assert scenario.compare.reference.leaves == {"graph": ()}
    assert scenario.checks == {
        "loss": {}, "state": {}, "finite": {}, "peak_memory": {"max_ratio": 2.0},
    }  # fmt: skip
    assert (scenario.launch.device, scenario.launch.timeout_s) == ("auto", 300.0)
    assert scenario.source == SMOKE.read_bytes()


def test_every_field_of_the_configuration_is_a_legal_leaf() -> None:
    """A field added to the configuration needs no change here to be legal in a scenario."""
    plain = TrainConfig().to_dict()
    leaves = {
        f"{part}.{name}" if isinstance(value, dict) else part
        for part, value in plain.items()
        for name in (value if isinstance(value, dict) else ("",))
    }
    assert set(settings.leaf_types()) == leaves | {"world_size", "plant"}


@pytest.mark.parametrize("leaf", sorted(settings.leaf_types()))
def test_every_leaf_has_a_decoder_that_refuses_a_list_of_lists(leaf: str, tmp_path: Path) -> None:
    """No leaf takes whatever it is given, and each refusal names the leaf."""
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, base="base: {" + leaf + ": [[1]]}")
    assert (caught.value.line, caught.value.key) == (3, f"base.{leaf}")


@pytest.mark.parametrize(
    ("text", "leaf", "value"),
    [
        ("{optim: {lr: 1}}", "optim.lr", 1.0),
        ("{optim: {lr: 1e-3}}", "optim.lr", 1e-3),
        ("{optim.lr: 2.5e-4}", "optim.lr", 2.5e-4),
        ("{seed: 1_000}", "seed", 1000),
        ("{model: dense_small}", "model.preset", "dense_small"),
        ("{model: {preset: dense_tiny, layers: 3}}", "model.layers", 3),
        ("{data: {kind: text, path: /a}}", "data.path", "/a"),
        ("{data.path: null}", "data.path", None),
        ("{fsdp: {reshard_after_forward: no}}", "fsdp.reshard_after_forward", False),
        ("{parallel: {dp: 4, dynamic_cp: [1, 2]}}", "parallel.dynamic_cp", (1, 2)),
        ("{model.q_lora_rank: 8}", "model.q_lora_rank", 8),
        ("{model.q_lora_rank: null}", "model.q_lora_rank", None),
        ("{model.capacity_factor: 1}", "model.capacity_factor", 1.0),
        ("{graph: eager}", "graph", ()),
        ("{stress: none}", "stress", ()),
        ("{compile: none}", "compile", ()),
        ("{compile: [mlp, attn]}", "compile", ("attn", "mlp")),
        ("{stress: [poison, jitter]}", "stress", ("jitter", "poison")),
        ("{plant: none}", "plant", None),
        ("{plant: ~}", "plant", None),
        ("{plant: {fault: ulp, step: 1, rank: last}}", "plant",
         PlantSpec(fault="ulp", step=1, rank=-1)),
        ("{plant: {fault: ulp, step: 1, rank: -1, tensor: a.b, legs: [reference]}}", "plant",
         PlantSpec(fault="ulp", step=1, rank=-1, tensor="a.b", legs=("reference",))),
        ("{plant: [{fault: ulp, step: 1}]}", "plant", PlantSpec(fault="ulp", step=1)),
        ("{plant: [{fault: ulp, step: 1}, {fault: hang, step: 2, chance: 0.3}]}", "plant",
         PlantSpec(fault="ulp", step=1, beside=(PlantSpec(fault="hang", step=2, chance=0.3),))),
    ],
)  # fmt: skip
def test_legal_values_decode(text: str, leaf: str, value: Any, tmp_path: Path) -> None:
    """Each legal way to write a value gives exactly that value, with its type."""
    decoded = value_of(load(tmp_path, base=f"base: {text}"), leaf)
    assert (decoded, type(decoded)) == (value, type(value))


def test_a_quoted_number_is_a_string(tmp_path: Path) -> None:
    """Quotes mean a string, so a quoted exponent is not taken for a number."""
    with pytest.raises(ScenarioError, match=r"optim.lr: expected a number, got '1e-3'"):
        load(tmp_path, base='base: {optim: {lr: "1e-3"}}')


def test_set_replaces_a_base_value_and_launch(tmp_path: Path) -> None:
    """`--set` wins over the file, for base keys and for launch."""
    scenario = load(
        tmp_path, Overrides(sets=("steps=7", "launch.timeout_s=5", "model={layers: 3}"))
    )
    assert value_of(scenario, "steps") == 7
    assert value_of(scenario, "model.layers") == 3
    assert scenario.launch.timeout_s == 5.0


def test_axis_replaces_an_axis_and_may_add_one(tmp_path: Path) -> None:
    """`--axis` replaces the file's values, or adds an axis."""
    scenario = load(tmp_path, Overrides(axes=("parallel=[{dp: 8}]", "seed=[1, 2]")))
    assert [axis.name for axis in scenario.axes] == ["parallel", "graph", "seed"]
    assert scenario.axes[0].choices[0].leaves == {"parallel.dp": 8}


@pytest.mark.parametrize(
    ("sets", "axes", "said"),
    [
        (("stepz=5",), (), "--set stepz: stepz: expected a known key"),
        (("steps=five",), (), "--set steps: steps: expected an integer, got 'five'"),
        (("steps",), (), "expected KEY=YAML, got 'steps'"),
        (("=5",), (), "expected KEY=YAML"),
        (("steps=",), (), "expected KEY=YAML"),
        (("steps=[",), (), "--set steps: syntax: expected valid YAML"),
        (("launch.tmeout_s=5",), (), "--set launch.tmeout_s: launch.tmeout_s: expected a known"),
        (("launch.timeout_s=1e300",), (), "and at most 2592000"),
        (("launch.slots=2", "launch.slots.x=2"), (), "--set launch.slots.x: launch.slots.x: exp"),
        (("launch.slots.x=2",), (), "launch.slots: expected an integer >= 1, got the mapping"),
        (("launch=2",), (), "--set launch: launch: expected a known key"),
        (("soak.perod=2",), (), "--set soak.perod: soak.perod: expected a known key"),
        (("launch.timeout_s=-5",), (), "--set launch.timeout_s: launch.timeout_s: expected"),
        (("graph=[attn]",), (), "--axis graph=[...]"),
        (("parallel={dp: 2}",), (), "expected a key that no axis sets"),
        ((), ("graph=eager",), "--axis graph: axes.graph: expected a list"),
        ((), ("grph=[eager]",), "--axis grph: axes.grph: expected a known key"),
        ((), ("seed=[1, 1]",), "--axis seed: axes.seed: expected each value once, got 1 twice"),
    ],
)
def test_a_wrong_option_is_named(
    sets: tuple[str, ...], axes: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """An error in an option names the option, not the file, and never goes unnoticed."""
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, Overrides(sets, axes))
    assert said in str(caught.value)
    assert "case.yaml" not in str(caught.value)


def test_a_rule_broken_by_an_axis_value_points_at_its_line(tmp_path: Path) -> None:
    """The line of a broken rule is that of the value that brought it in."""
    from harness.scenario.matrix import expand

    axes = "axes:\n  graph: [eager, [attn]]\n  model.heads:\n    - 4\n    - 5"
    with pytest.raises(ScenarioError, match="a divisor of hidden=64, got 5") as caught:
        expand(load(tmp_path, axes=axes), "cpu")
    assert (caught.value.line, caught.value.key) == (8, "model.heads")


def test_a_file_that_lies_about_its_size_is_read_no_further_than_the_limit() -> None:
    """A file of stated size 0 that goes on is refused by what was read."""
    with pytest.raises(ScenarioError, match="file: expected"):
        load_scenario("/proc/self/mem")


CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 30))
"""Each alias one level deeper than the last."""


@pytest.mark.parametrize("text", ["[" * 500_000, "{a: " * 200_000, "- " * 400_000, CHAIN])
def test_deep_nesting_is_refused_before_the_stack_is_used(text: str, tmp_path: Path) -> None:
    """Depth is limited while reading, so no file can exhaust the stack."""
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ScenarioError, match="at most 20 levels"):
        load_scenario(path)
    assert time.process_time() - began < 1


def test_aliases_may_be_used_within_the_limit(tmp_path: Path) -> None:
    """An anchor is a legal way not to repeat oneself."""
    scenario = load(tmp_path, axes="axes: {graph: [eager, [attn]], parallel: [&d {dp: 2}]}",
                    exclude="exclude: [{parallel: *d}]")  # fmt: skip
    assert scenario.exclude[0].choices["parallel"].leaves == {"parallel.dp": 2}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A named pipe is refused, not read."""
    import os

    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)
    with pytest.raises(ScenarioError, match="got not a regular file"):
        load_scenario(path)


def test_a_path_with_a_null_byte_is_a_usage_error() -> None:
    """What the system refuses to look up is refused in one line too."""
    with pytest.raises(ScenarioError, match="expected a readable file"):
        load_scenario("a\0b")


@given(data=st.binary(max_size=300))
@example(data=b"1_")
@example(data=b"1__0")
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    """No input ends in anything but a value or a one-line refusal."""
    try:
        parse_bytes(data, Origin("f", 1)).plain()
    except ScenarioError as error:
        assert str(error).isprintable()  # noqa: PT017 - both ends are legal


TEXTS = st.text("ab:#-[]{}'\"\n é", max_size=8)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
        max_leaves=12,
    )
)  # fmt: skip
def test_what_yaml_writes_is_read_back(value: Any) -> None:
    """Plain values survive a round trip through PyYAML's writer and our reader."""
    import yaml

    # default_style quotes every string: keys such as a bare `no` are refused here, on purpose.
    text = yaml.safe_dump(value, default_style='"', allow_unicode=True) if isinstance(
        value, str
    ) else yaml.safe_dump(value, allow_unicode=True)  # fmt: skip
    assert parse_text(text, Origin("f", 1)).plain() == value


def test_presets_are_the_legal_models(tmp_path: Path) -> None:
    """The legal values of `model` are the presets that exist."""
    with pytest.raises(ScenarioError) as caught:
        load(tmp_path, base="base: {model: huge}")
    assert caught.value.legal == tuple(MODEL_PRESETS)


@pytest.mark.parametrize(("product", "dp"), [("world_size: 4", 4), ("world_size: 2", 2)])
def test_a_world_size_that_fits_is_accepted(product: str, dp: int, tmp_path: Path) -> None:
    """`world_size` is checked against the degrees and changes nothing else."""
    from harness.scenario.matrix import expand

    axes = "axes: {graph: [eager, [attn]]}"
    scenario = load(tmp_path, base=f"base: {{parallel: {{dp: {dp}}}, {product}}}", axes=axes)
    without = load(tmp_path, base=f"base: {{parallel: {{dp: {dp}}}}}", axes=axes)
    assert expand(scenario, "cpu") == expand(without, "cpu")


def test_the_fast_plain_form_equals_to_dict() -> None:
    """`plain_config` is `to_dict`, only faster, and hands out nothing that is shared."""
    config = TrainConfig(
        graph=("attn",), stress=("poison",), parallel=ParallelConfig(dp=2, dynamic_cp=(1, 2))
    )
    plain = settings.plain_config(config)
    assert plain == config.to_dict()
    plain["model"]["hidden"] = 0
    plain["parallel"]["dynamic_cp"].append(4)
    assert settings.plain_config(config) == config.to_dict()


def compare(expect: str) -> str:
    return f"compare: {{axis: graph, reference: eager, expect: {expect}}}"


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        ("bitwise", "bitwise"),
        ("rounding", "rounding"),
        ("{rtol: 1e-5, atol: 0}", {"rtol": 1e-5, "atol": 0.0}),
        ("{loss_gap: 0.01, over: 3}", {"loss_gap": 0.01, "over": 3.0}),
    ],
)
def test_compare_expect_is_bitwise_or_a_tolerance(tmp_path: Path, text: str, expect: Any) -> None:
    """Numbers as YAML writes them, `1e-5` included, become the cases' `expect`."""
    assert load(tmp_path, compare=compare(text)).compare.expect == expect


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{rtol: 0}", "compare.expect: expected rtol or atol above 0"),
        ("{rtol: -1}", "compare.expect.rtol: expected a number >= 0, got -1.0"),
        ("{rtol: 1, over: 2}", "compare.expect: expected rtol and atol, or both loss_gap and over"),
        ("{loss_gap: 1}", "compare.expect: expected rtol and atol, or both loss_gap and over"),
        ("{loss_gap: 1, over: 0.5}", "compare.expect.over: expected an integer >= 1"),
        ("{ulps: 3}", "compare.expect.ulps: expected a known key"),
    ],
)
def test_an_expect_that_bounds_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A tolerance is refused with its key and what was expected, before anything runs."""
    with pytest.raises(ScenarioError, match=message):
        load(tmp_path, compare=compare(text))


def test_a_tolerance_asks_for_the_check_that_it_is_on(tmp_path: Path) -> None:
    """Without the check `loss` a tolerance would compare nothing."""
    with pytest.raises(ScenarioError, match="expected loss, which is what the tolerance"):
        load(tmp_path, compare=compare("{rtol: 1e-5}"), checks="checks: {state: {}}")


@pytest.mark.parametrize(
    ("base", "axes", "line", "told"),
    [
        ("{steps: 4}", "{parallel: [{dp: 1000000000}]}", 4, "1000000000, which makes 1000000000"),
        ("{steps: 4, parallel: {dp: 70000}}", "{parallel.dp_outer: [2]}", 3,
         "70000, which makes 140000"),
    ],
)  # fmt: skip
def test_more_ranks_than_there_are_is_a_usage_error(
    tmp_path: Path, base: str, axes: str, line: int, told: str
) -> None:
    """The largest degree is named with its line, before any run is made."""
    crossed = f"axes: {axes[:-1]}, graph: [eager, [attn]]}}"
    with pytest.raises(ScenarioError) as caught:
        expand(load(tmp_path, base=f"base: {base}", axes=crossed), "cpu")
    assert f":{line}: parallel.dp: expected at most 131072 ranks" in str(caught.value)
    assert f"got {told} ranks" in str(caught.value)


def test_an_option_says_how_long_a_soak_is_instead_of_the_file(tmp_path: Path) -> None:
    """Another length replaces the file's; a section that the file lacks is made."""
    base, checks = "base: {steps: 64}", "checks: {state: {}, soak: {}}"
    for exclude in ("soak: {replays: 500, stall_s: 9}", "exclude: []"):
        options = Overrides(sets=("soak.duration_s=7", "soak.stall_s=9"))
        scenario = load(tmp_path, options, base=base, checks=checks, exclude=exclude)
        assert scenario.soak is not None
        spec = scenario.soak.spec
        assert (spec.by, spec.amount, spec.stall_s) == ("duration", 7.0, 9.0)
