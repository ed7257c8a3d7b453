"""Every malformed scenario of the corpus: its one line, and its exit code.

The corpus lies in `malformed/`, one mistake a file. `@` stands for the file's path.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main

CORPUS = Path(__file__).parent / "malformed"

EXPECTED: dict[str, str] = {
    "axes_empty": "@:4: axes: expected at least one axis, got an empty mapping",
    "axes_overlap": "@:4: axes.parallel.dp: expected each setting on one axis, got parallel.dp, which the axis parallel sets too",  # noqa: E501
    "axis_duplicate_value": "@:7: axes.parallel: expected each value once, got the mapping {'dp': 2} again (first on line 6)",  # noqa: E501
    "axis_empty": "@:4: axes.parallel: expected a list of values of parallel, got an empty list",
    "axis_scalar": "@:4: axes.parallel: expected a list of values of parallel, got the mapping {'dp': 2}",  # noqa: E501
    "backend_bool": '@:3: base.backend: expected a string, "on" in quotes, got true (YAML reads a bare on as a bool)',  # noqa: E501
    "binary": "@:2: file: expected UTF-8 text, got byte 0x80",
    "checks_empty": "@:6: checks: expected at least one check, got an empty mapping; legal values: loss, state, taps, finite, graphs, peak_memory, throughput, soak",  # noqa: E501
    "checks_no_evidence": "@:6: checks: expected a check that compares bits, since compare.expect is bitwise, got finite; legal values: loss, state, taps",  # noqa: E501
    "checks_parameter": "@:6: checks.loss: expected an empty mapping, {}, got the mapping {'rtol': 0.01}",  # noqa: E501
    "checks_unknown": "@:6: checks.lost: expected a known key, got 'lost' (did you mean loss?); legal values: loss, state, taps, finite, graphs, peak_memory, throughput, soak",  # noqa: E501
    "compare_expect_close": "@:5: compare.expect: expected one of the legal values, got 'close'; legal values: bitwise, rounding",  # noqa: E501
    "compare_reference_alone": "@:4: axes.graph: expected a value beside the reference to compare with it, got the reference alone",  # noqa: E501
    "compare_unknown_axis": "@:5: compare.axis: expected one of the legal values, got 'graphs' (did you mean graph?); legal values: parallel, graph",  # noqa: E501
    "compare_unknown_reference": "@:5: compare.reference: expected a value of the axis graph, got the list ['full_iteration']",  # noqa: E501
    "compare_world_sizes": "@:4: axes.parallel: expected the reference's world size, 2, to compare one to one, got 4",  # noqa: E501
    "date_value": "@:2: syntax: expected a quoted string, got the date 2024-01-01",
    "degree_zero": "@:7: parallel.dp: expected an integer >= 1, got 0",
    "duplicate_key": "@:8: why: expected each key once, got it again (first on line 2)",
    "empty": "@:1: file: expected a scenario, got an empty file",
    "exclude_everything": "@: exclude leaves no case of case",
    "exclude_reference_only": "@:8: exclude: expected an entry that removes a case, got graph: eager, which matches none (the reference leg is no case)",  # noqa: E501
    "exclude_unknown_axis": "@:8: exclude.grph: expected a known key, got 'grph' (did you mean graph?); legal values: parallel, graph",  # noqa: E501
    "exclude_unknown_value": "@:8: exclude.parallel: expected a value of the axis parallel, got the mapping {'dp': 16}",  # noqa: E501
    "graph_bare_scope": "@:4: axes.graph: expected eager or a list of scopes, got 'attn' (scopes go in a list: [attn]); legal values: eager, attn, mlp, moe_router, moe_preprocess, moe, layer, full_iteration",  # noqa: E501
    "graph_empty_list": "@:4: axes.graph: expected eager or a list of scopes, got an empty list (say eager); legal values: eager, attn, mlp, moe_router, moe_preprocess, moe, layer, full_iteration",  # noqa: E501
    "graph_unknown_scope": "@:4: axes.graph: expected one of the legal values, got 'atn' (did you mean attn?); legal values: attn, mlp, moe_router, moe_preprocess, moe, layer, full_iteration",  # noqa: E501
    "heads_do_not_divide": "@:3: model.heads: expected a divisor of hidden=64, got 3; rule: heads_divide_hidden",  # noqa: E501
    "include_adds_nothing": "@:8: include: expected an entry that extends or adds a case, got parallel: dp2, graph: attn, a case that the axes already give",  # noqa: E501
    "include_not_a_case": "@:8: include.graph: expected a value to compare with the reference, since no case fits to be extended, got nothing",  # noqa: E501
    "key_list": "@:3: base: expected a string key, got a list or mapping",
    "key_no": "@:3: syntax: expected a string key, quoted, got false (YAML reads a bare no as a bool)",  # noqa: E501
    "latin1": "@:2: file: expected UTF-8 text, got byte 0xf6",
    "launch_device": "@:7: launch.device: expected one of the legal values, got 'gpu' (did you mean cpu?); legal values: auto, cpu, cuda",  # noqa: E501
    "launch_slots_zero": "@:7: launch.slots: expected an integer >= 1, got 0",
    "launch_confirm_word": "@:7: launch.confirm: expected a bool, got 'maybe'; legal values: true, false",  # noqa: E501
    "launch_retries_many": "@:7: launch.retries: expected an integer from 0 to 5, got 6",
    "launch_timeout_negative": "@:7: launch.timeout_s: expected a number > 0, got -1",
    "lr_nan": "@:3: syntax: expected a finite decimal number, or a quoted string, got .nan",
    "lr_word": "@:3: base.optim.lr: expected a number, got 'fast'",
    "merge_key": "@:3: base: expected keys written out, got a merge key (<<)",
    "missing_compare": "@:1: compare: expected this key, got nothing; legal values: ",
    "model_unknown": "@:3: base.model: expected one of the legal values, got 'dense_tinny' (did you mean dense_tiny?); legal values: ",  # noqa: E501
    "name_no": '@:1: name: expected a string, "no" in quotes, got false (YAML reads a bare no as a bool)',  # noqa: E501
    "name_slash": "@:1: name: expected a file name of at most 80 letters, digits, '_', '-' and '.', no '.' first, got '../escape'",  # noqa: E501
    "nul_byte": "@:2: file: expected text, got the control character 0x00",
    "nul_escape": "@:2: syntax: expected text, got the character '\\x00'",
    "only_comment": "@:1: file: expected a scenario, got an empty file",
    "path_without_text": "@:3: data.path: expected no path unless kind is text, got '/tmp/x'",
    "peak_memory_formula_attribute": "@:6: checks.peak_memory.max_bytes: expected numbers, names, + - * /, brackets, min and max of several, got 'parameters.__class__'",  # noqa: E501
    "peak_memory_formula_endless": "@:6: checks.peak_memory.max_bytes: expected a number > 0, got '1e999', which comes to inf",  # noqa: E501
    "peak_memory_formula_negative": "@:6: checks.peak_memory.max_bytes: expected a number > 0, got 'parameters - 2 * parameters', which it never is",  # noqa: E501
    "peak_memory_formula_power": "@:6: checks.peak_memory.max_bytes: expected numbers, names, + - * /, brackets, min and max of several, got '9 ** 9 ** 9 ** 9'",  # noqa: E501
    "peak_memory_formula_unit": "@:6: checks.peak_memory.max_bytes: expected a formula, as in 1.2 * parameters + 64 * MiB, got '64 MiB': invalid syntax",  # noqa: E501
    "peak_memory_formula_unknown": "@:6: checks.peak_memory.max_bytes: expected a formula over known names, got weights; legal values: parameters, gradients, optimizer, largest_unit, reference, world_size, layers, hidden, vocab_size, seq, microbatches, micro_batch_size",  # noqa: E501
    "peak_memory_formula_zero": "@:6: checks.peak_memory.max_bytes: expected a number > 0, got 'parameters / (1 - 1)': float division by zero",  # noqa: E501
    "peak_memory_ratio_word": "@:6: checks.peak_memory.max_ratio: expected a number > 0, got 'two'",
    "plant_rank_outside": "@:3: plant.rank: expected last or a rank below the world size 2, got 2",
    "plant_step_too_late": "@:3: plant.step: expected a step below steps=4, got 4",
    "plant_takes_no_tensor": "@:3: base.plant.tensor: expected what the fault hang takes, got a key that it does not take; legal values: fault, step, rank, legs, chance",  # noqa: E501
    "plant_unknown": "@:3: base.plant.fault: expected one of the legal values, got 'ulpp' (did you mean ulp?); legal values: ",  # noqa: E501
    "plant_without_step": "@:3: base.plant.step: expected what the fault ulp takes, got nothing; legal values: fault, step, rank, tensor, legs, chance",  # noqa: E501
    "pool_not_stable": "@:5: fsdp.pool: expected stable buffers for the partial graph scope attn, got 'dynamic'; legal values: double, traced; rule: partial_scopes_need_stable_pool",  # noqa: E501
    "python_tag": "@:1: syntax: expected a value without a tag, got the tag '!!python/object/apply:os.system'",  # noqa: E501
    "recursive_anchor": "@:1: base.model: expected an anchor defined above, got *b",
    "reshard_string": "@:3: base.fsdp.reshard_after_forward: expected a bool, got 'yes'; legal values: true, false",  # noqa: E501
    "same_runs_twice": "@:4: axes.graph: expected each case once, got dp2_tp1-attn, the same runs as dp2-attn",  # noqa: E501
    "seed_octal": "@:3: syntax: expected a finite decimal number, or a quoted string, got 0123",
    "steps_bool": "@:3: base.steps: expected an integer, got true (YAML reads a bare yes as a bool)",  # noqa: E501
    "steps_float": "@:3: base.steps: expected an integer, got 20.0",
    "steps_huge": "@:3: base.steps: expected an integer of at most 64 bits, got 99999999999999999999",  # noqa: E501
    "steps_string": "@:3: base.steps: expected an integer, got '20'",
    "steps_zero": "@:3: steps: expected an integer >= 1, got 0",
    "surrogate_escape": "@:2: syntax: expected valid YAML, got an error: found invalid Unicode character escape code",  # noqa: E501
    "tab": "@:3: syntax: expected valid YAML, got an error: found character that cannot start any token",  # noqa: E501
    "too_deep": "@:3: base: expected at most 20 levels, got deeper nesting",
    "too_many_combinations": "@:5: axes: expected at most 50,000 combinations, got seed 39 x steps 39 x microbatches 39 x graph 2 = 118,638",  # noqa: E501
    "top_is_list": "@:1: file: expected a mapping, got the list [{'name': 'x'}]; legal values: ",
    "tp_does_not_divide": "@:4: parallel.tp: expected a divisor of kv_heads=2, got 4; legal values: 1, 2; rule: tp_divides_kv_heads",  # noqa: E501
    "two_documents": "@:8: file: expected one YAML document, got a second one",
    "unclosed": "@:3: syntax: expected valid YAML, got an error: did not find expected ',' or ']'",
    "unknown_anchor": "@:1: name: expected an anchor defined above, got *nobody",
    "unknown_base_key": "@:3: base.stepz: expected a known key, got 'stepz' (did you mean steps?); legal values: ",  # noqa: E501
    "unknown_dotted_key": "@:3: base.optim.lrr: expected a known key, got 'optim.lrr' (did you mean optim.lr?); legal values: ",  # noqa: E501
    "unknown_nested_key": "@:3: base.optim.learning_rate: expected a known key, got 'learning_rate'; legal values: ",  # noqa: E501
    "unknown_section": "@:8: basis: expected a known key, got 'basis' (did you mean base?); legal values: ",  # noqa: E501
    "tier_unknown": "@:8: tier: expected one of the legal values, got 'nighly' (did you mean nightly?); legal values: smoke, pr, nightly, weekly",  # noqa: E501
    "select_list": "@:8: select: expected a string, got the list ['pairwise']; legal values: all, pairwise",  # noqa: E501
    "why_empty": "@:2: why: expected a sentence that says what is at stake, got an empty string",
    "world_size_product": "@:3: world_size: expected 4, the product of the degrees (dp=4), got 8",
    "base_setting_twice": "@:3: base.fsdp.pool: expected each setting once, got it again (first on line 3)",  # noqa: E501
    "default_broken_by_neighbour": "@:3: model.heads: expected a divisor of hidden=30, got 4; rule: heads_divide_hidden",  # noqa: E501
    "alias_as_key": "@:3: base.A sentence.: expected a known key, got 'A sentence.'; legal values: ",  # noqa: E501
    "alias_list_as_key": "@:3: base: expected a string key, got *g",
    "include_sets_axis_by_leaf": "@:8: include.parallel.dp: expected the axis' own name, parallel, got parallel.dp under another name",  # noqa: E501
    "include_setting_twice": "@:8: include.fsdp.pool: expected each setting once, got fsdp.pool, which fsdp sets too",  # noqa: E501
    "include_empty": "@:8: include: expected at least one key, got an empty mapping",
    "exclude_scalar": "@:8: exclude: expected a list of mappings, got 'dp2'",
    "graph_in_base_dynamic_pool": "@:3: fsdp.persistent_on_miss: expected true for the partial graph scope attn, got false; legal values: true; rule: partial_scopes_need_persistence",  # noqa: E501
    "loss_null": "@:6: checks.loss: expected an empty mapping, {}, got nothing",
    "peak_memory_empty": "@:6: checks.peak_memory: expected max_ratio or max_bytes or max_growth_bytes, got an empty mapping; legal values: max_ratio, max_bytes, max_growth_bytes",  # noqa: E501
    "plant_chance_over_one": "@:3: base.plant.chance: expected a number > 0, at most 1, got 1.5",
    "plant_chance_zero": "@:3: base.plant.chance: expected a number > 0, got 0",
    "plant_fault_twice": "@:3: base.plant: expected each fault once, got ulp 2 times",
    "plant_no_faults": "@:3: base.plant: expected a list of faults, got an empty list",
    "plant_second_too_late": "@:3: plant.step: expected a step below steps=4, got 4",
    "plant_legs_twice": "@:3: base.plant.legs: expected each leg once, got the list ['candidate', 'candidate']",  # noqa: E501
    "ep_without_experts": "@:4: parallel.ep: expected 1, as the model has no experts, got 2; legal values: 1; rule: expert_axes_need_experts",  # noqa: E501
    "sequence_parallel_without_tp": "@:4: parallel.sequence_parallel: expected false, as tp is 1, got true; legal values: false; rule: sequence_parallel_needs_tp",  # noqa: E501
    "dynamic_cp_scalar": "@:4: axes.parallel.dynamic_cp: expected a list of sizes, got 4",
    "dynamic_cp_not_a_divisor": "@:4: parallel.dynamic_cp: expected powers of two that divide dp * cp = 4, got (2, 8); legal values: 1, 2, 4; rule: dynamic_cp_fits",  # noqa: E501
    "legal_layouts_zero": "@:4: axes.parallel.legal_layouts: expected an integer >= 1, got 0",
    "legal_layouts_huge": "@:4: axes.parallel.legal_layouts: expected an integer from 1 to 1,048,576, got 100000000",  # noqa: E501
    "legal_layouts_none": "@:4: axes.parallel: expected a legal layout of 8 ranks, got none for the model dense_tiny",  # noqa: E501
    "legal_layouts_unknown_key": "@:4: axes.parallel.tpp: expected a known key, got 'tpp' (did you mean tp?); legal values: legal_layouts, dp, dp_outer, tp, cp, ep, etp, pp, sequence_parallel, pp_chunks, dynamic_cp",  # noqa: E501
    "legal_layouts_word": "@:4: axes.parallel.tp: expected an integer, got 'two'",
    "legal_layouts_and_degree": "@:3: base.parallel.tp: expected no degree, as axes.parallel lists whole layouts, got 2",  # noqa: E501
    "legal_layouts_of_models": "@:4: axes.model: expected the model in base, as the axis parallel lists layouts that are legal for it, got an axis of models",  # noqa: E501
    "scopes_of_experts": "@:4: graph: expected no scope moe_router, as the model has no experts, got ['moe_router']; rule: scopes_need_experts",  # noqa: E501
    "why_too_long": "@:2: why: expected at most 1000 characters, got 'word word word word word word word word word word word word word word word wor\u2026 (2001 characters)",  # noqa: E501
    "stress_unknown": "@:8: base.stress: expected one of the legal values, got 'jiter' (did you mean jitter?); legal values: jitter, poison, scramble, races",  # noqa: E501
    "stress_str": "@:8: base.stress: expected none or a list of stressors, got 'jitter' (stressors go in a list: [jitter]); legal values: none, jitter, poison, scramble, races",  # noqa: E501
    "stress_dup": "@:8: stress: expected each stressor once, got ['jitter', 'jitter']; rule: stressors_differ",  # noqa: E501
    "stress_null": "@:8: base.stress: expected none or a list of stressors, got nothing; legal values: none, jitter, poison, scramble, races",  # noqa: E501
    "stress_empty": "@:8: base.stress: expected none or a list of stressors, got an empty list (say none); legal values: none, jitter, poison, scramble, races",  # noqa: E501
    "stress_none_and": "@:8: base.stress: expected one of the legal values, got 'none'; legal values: jitter, poison, scramble, races",  # noqa: E501
    "stress_same_in_another_order": "@:10: axes.stress: expected each value once, got the list ['poison', 'jitter'] twice",  # noqa: E501
    "stress_ledger": "@:8: base.stress: expected one of the legal values, got 'ledger'; legal values: jitter, poison, scramble, races",  # noqa: E501
    "stress_seed_negative": "@:8: stress_seed: expected an integer >= 0, got -1",
    "stress_seed_word": "@:8: base.stress_seed: expected an integer, got 'abc'",
    "compare_expect_over_steps": "@:10: compare.expect.over: expected at most the number of steps, 4, got 5",  # noqa: E501
    "taps_kind": "@:8: taps: expected input, output or gradient after the colon, got 'layers.0:grad'; legal values: input, output, gradient; rule: taps_are_patterns",  # noqa: E501
    "taps_empty_pat": "@:8: taps: expected a module's dotted name, with * for one part of it and ** for any, got ''; rule: taps_are_patterns",  # noqa: E501
    "taps_str": "@:8: base.taps: expected a list of names, got 'layers.0'",
    "taps_dup": "@:8: taps: expected each pattern once, got ['layers.0', 'layers.0:output']; rule: taps_differ",  # noqa: E501
    "taps_check_without": "@:11: checks.taps: expected taps in base, of the modules to compare, got none",  # noqa: E501
    "taps_check_arg": "@:12: checks.taps: expected an empty mapping, {}, got the mapping {'max': 3}",  # noqa: E501
    "taps_bracket": "@:8: taps: expected a module's dotted name, with * for one part of it and ** for any, got 'layers[0].attn'; rule: taps_are_patterns",  # noqa: E501
    "graph_optimizer_word": "@:8: base.graph_optimizer: expected a bool, got 'nope'; legal values: true, false",  # noqa: E501
    "graph_optimizer_in_partial_scope": "@:8: graph_optimizer: expected true, as no partial scope holds the optimizer, got false; legal values: true; rule: optimizer_is_of_full_iteration",  # noqa: E501
    "graph_optimizer_axis": "@:10: graph_optimizer: expected true, as no partial scope holds the optimizer, got false; legal values: true; rule: optimizer_is_of_full_iteration",  # noqa: E501
    "graph_warmup_steps_zero": "@:8: graph_warmup_steps: expected an integer >= 1, got 0",
    "steps_without_a_replay": "@:5: steps: expected more than graph_warmup_steps=2, or no graph is ever replayed, got 2; rule: graphs_are_replayed",  # noqa: E501
    "graph_full_more": "@:9: graph: expected full_iteration alone, it holds every other, got ['attn', 'full_iteration']; rule: full_iteration_stands_alone",  # noqa: E501
    "graph_layer_more": "@:9: graph: expected layer alone, it holds its branches, got ['attn', 'layer']; rule: layer_stands_alone",  # noqa: E501
    "graph_moe_router_moe": "@:9: graph: expected moe without moe_router and moe_preprocess, it holds both, got ['moe_router', 'moe']; rule: moe_holds_its_stages",  # noqa: E501
    "graph_preprocess_alone": "@:9: graph: expected moe_router beside moe_preprocess, which goes on with its outputs, got ['moe_preprocess']; rule: preprocess_follows_router",  # noqa: E501
    "graph_dup": "@:9: graph: expected each scope once, got ['attn', 'attn']; rule: scopes_differ",
    "graph_same_scopes_in_another_order": "@:9: axes.graph: expected each value once, got the list ['mlp', 'attn'] twice",  # noqa: E501
    "scope_mlp_without_dense": "@:9: graph: expected no scope mlp, as every layer has experts, got ['mlp']; rule: mlp_needs_dense_ffn",  # noqa: E501
    "scope_moe_dropless": "@:4: model.capacity_factor: expected a number > 0 (drop and pad), as the scope moe runs experts, got nothing; rule: captured_experts_have_capacity",  # noqa: E501
    "pool_dynamic_under_partial_scope": "@:8: fsdp.pool: expected stable buffers for the partial graph scope attn, got 'dynamic'; legal values: double, traced; rule: partial_scopes_need_stable_pool",  # noqa: E501
    "pool_unknown": "@:8: fsdp.pool: expected one of the legal values, got 'tripple'; legal values: dynamic, double, traced",  # noqa: E501
    "not_persistent_under_partial_scope": "@:8: fsdp.persistent_on_miss: expected true for the partial graph scope attn, got false; legal values: true; rule: partial_scopes_need_persistence",  # noqa: E501
    "microbatches_zero": "@:8: microbatches: expected an integer >= 1, got 0",
    "plant_in_capture_without_attention": "@:10: plant.fault: expected a graph scope that capture_raise can be planted in, got mlp in the candidate; legal values: attn, layer, full_iteration",  # noqa: E501
    "plant_in_a_layout_without_its_part": "@:9: plant.fault: expected a layout with sequence_parallel, for norm_sum_missing to be planted in, got tp 2, sequence_parallel false in the candidate",  # noqa: E501
    "plant_in_capture_with_step": "@:10: axes.plant.step: expected what the fault capture_raise takes, got a key that it does not take; legal values: fault, rank, legs, chance",  # noqa: E501
    "full_iteration_with_dynamic_cp": "@:7: parallel.dynamic_cp: expected no sizes, as the scope full_iteration fixes those of all microbatches, got (1, 2); rule: full_iteration_has_one_cp",  # noqa: E501
}
"""File to line; a line that ends in `legal values: ` goes on with names that may grow."""
NOTHING_LEFT = ("exclude_everything",)


def test_the_table_is_the_corpus() -> None:
    """Every file has its line and every line its file."""
    assert {path.stem for path in CORPUS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_one_clear_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake costs one line with file, line, key, expected, got; exit 4, or 5 for no case."""
    path = CORPUS / f"{name}.yaml"
    began = time.process_time()
    code = main(["run", str(path), "--dry-run"])
    seconds = time.process_time() - began
    out, err = capsys.readouterr()
    expected = "harness: " + EXPECTED[name].replace("@", str(path))
    if expected.endswith("legal values: "):
        assert err.startswith(expected)
    else:
        assert err == expected + "\n"
    assert err.count("\n") == 1
    assert out == ""
    assert code == (5 if name in NOTHING_LEFT else 4)
    assert seconds < 2


def _monsters(folder: Path) -> dict[str, Path]:
    """Files too large to keep: made when needed."""
    huge = folder / "huge.yaml"
    with huge.open("wb") as file:
        for _ in range(100):
            file.write(b"# " + b"x" * 999_997 + b"\n")
    laughs = folder / "laughs.yaml"
    lines = ["a0: &a0 [" + ", ".join("x" * 9) + "]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * 9) + "]" for i in range(1, 40)]
    laughs.write_text("\n".join(lines))
    deep = folder / "deep.yaml"
    deep.write_text("base: " + "[" * 900_000)
    wide = folder / "wide.yaml"
    wide.write_text("name: [" + "1, " * 300_000 + "]")
    random = folder / "random.yaml"
    random.write_bytes(bytes((i * 7919 + i // 251) % 256 for i in range(500_000)))
    missing, empty_name = folder / "missing.yaml", folder / "x" / ".." / "gone.yaml"
    return {
        "huge": huge, "laughs": laughs, "deep": deep, "wide": wide, "random": random,
        "missing": missing, "gone": empty_name,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("huge", "file: expected at most 1,000,000 bytes, got 100,000,000 bytes"),
        ("laughs", "a4: expected at most 20,000 values, aliases expanded"),
        ("deep", "base: expected at most 20 levels, got deeper nesting"),
        ("wide", "name: expected at most 20,000 values, aliases expanded, got at least 20,001"),
        ("random", "file: expected UTF-8 text, got byte"),
        ("missing", "file: expected a scenario file, got no such file"),
        ("gone", "file: expected a scenario file, got no such file"),
    ],
)
def test_monsters_cost_one_line_and_no_time(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 MB, exploding anchors, deep and wide files, no file: one line, exit 4, under 2 s."""
    path = _monsters(tmp_path)[name]
    began = time.process_time()
    code = main(["run", str(path)])
    seconds = time.process_time() - began
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert err.startswith(f"harness: {path}:")
    assert said in err
    assert seconds < 2


def test_the_same_through_a_real_process() -> None:
    """A user's shell sees the same line and exit code, for less than 2 s of processor time."""
    path = CORPUS / "steps_string.yaml"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(path)],
        capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[4])},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr == f"harness: {path}:3: base.steps: expected an integer, got '20'\n"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
