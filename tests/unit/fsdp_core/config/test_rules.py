"""Every rule of the tables: an example that breaks it and nothing before it, and the way out."""

import dataclasses
import json
from typing import Any

import pytest

from fsdp_core.config import (
    BEGINS_AT,
    EIGHT_BITS,
    ENGINES,
    MODEL_PRESETS,
    RULES,
    SCOPES,
    ConfigError,
    DataConfig,
    FsdpConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    broken,
    captured_layers,
    divisors,
    model_from_preset,
    scope_sets,
    tap_pattern,
)
from fsdp_core.config import __main__ as printed

MLA: dict[str, Any] = {
    "attention": "mla", "kv_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 32}
Values = dict[str, Any]
# rule: (key at fault, values that break it, what to change)
EXAMPLES: dict[str, tuple[str, Values, Values]] = {
    "parts_are_known": ("compile", {"compile": ("inside",)}, {"compile": ("attn",)}),
    "parts_differ": ("compile", {"compile": ("attn", "attn")}, {"compile": ("attn", "mlp")}),
    "layer_is_compiled_alone": ("compile", {"compile": ("layer", "attn")}, {"compile": ("layer",)}),
    "compiled_layers_have_no_experts": ("compile", {"model": MOE, "compile": ("layer",)},
        {"compile": ("attn",)}),
    "preprocess_is_compiled_with_router": ("compile",
        {"model": MOE, "compile": ("moe_preprocess",)},
        {"compile": ("moe_router", "moe_preprocess")}),
    "compiled_parts_exist": ("compile", {"compile": ("moe_router",)}, {"compile": ("mlp",)}),
    "compiled_experts_have_capacity": ("model.capacity_factor",
        {"model": MOE, "compile": ("experts",)}, {"model": {"capacity_factor": 1.0}}),
    "graphs_cut_no_compiled_part": ("compile", {"graph": ("attn",), "compile": ("layer",)},
        {"graph": ("layer",)}),
    "compiled_parts_have_one_cp": ("parallel.dynamic_cp",
        {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}, "compile": ("attn",)},
        {"parallel": {"dynamic_cp": ()}}),
    "compiled_parts_are_torchs": ("backend", {"backend": "te", "compile": ("attn",)},
        {"backend": "torch"}),
    "races_see_operators": ("stress", {"stress": ("races",), "compile": ("attn",)},
        {"compile_backend": "aot_eager"}),
    "stressors_are_known": ("stress", {"stress": ("poisson",)}, {"stress": ("poison",)}),
    "stressors_differ": ("stress", {"stress": ("jitter", "jitter")},
        {"stress": ("jitter", "races")}),
    "other_engines_have_torch_parts": ("compile", {"engine": "fsdp2", "compile": ("attn",)},
        {"engine": "ours"}),
    "other_engines_graph_whole_steps": ("graph", {"engine": "fsdp2", "graph": ("attn",)},
        {"graph": ("full_iteration",)}),
    "other_engines_cut_over_dp": ("parallel.tp", {"engine": "ddp", "parallel": {"dp": 2, "tp": 2}},
        {"parallel": {"tp": 1}}),
    "other_engines_shard_their_way": ("fsdp.reshard_after_forward",
        {"engine": "megatron_fsdp", "fsdp": {"reshard_after_forward": False}}, {"engine": "fsdp2"}),
    "heads_divide_hidden": ("heads", {"model": {"heads": 5, "kv_heads": 5}},
        {"model": {"head_dim": 16}}),
    "rope_turns_pairs": ("qk_rope_head_dim", {"model": MLA | {"qk_rope_head_dim": 3}},
        {"model": {"qk_rope_head_dim": 2}}),
    "kv_heads_divide_heads": ("kv_heads", {"model": {"kv_heads": 3}}, {"model": {"kv_heads": 1}}),
    "mla_has_widths": ("v_head_dim", {"model": MLA | {"v_head_dim": 0}},
        {"model": {"v_head_dim": 1}}),
    "mla_keys_need_mla": ("kv_lora_rank", {"model": MLA | {"attention": "gqa"}},
        {"model": {"attention": "mla"}}),
    "mla_has_all_kv_heads": ("kv_heads", {"model": MLA | {"kv_heads": 2}},
        {"model": {"kv_heads": 4}}),
    "mla_decides_head_dim": ("head_dim", {"model": MLA | {"head_dim": 16}},
        {"model": {"head_dim": 12}}),
    "qk_norm_needs_gqa": ("qk_norm", {"model": MLA | {"qk_norm": True}},
        {"model": {"qk_norm": False}}),
    "expert_keys_need_experts": ("capacity_factor", {"model": {"capacity_factor": 1.0}},
        {"model": MOE}),
    "top_k_within_experts": ("top_k", {"model": MOE | {"top_k": 9}}, {"model": {"top_k": 8}}),
    "experts_have_width": ("expert_ffn", {"model": MOE | {"expert_ffn": 0}},
        {"model": {"expert_ffn": 1}}),
    "some_layer_has_experts": ("first_dense_layers", {"model": MOE | {"first_dense_layers": 2}},
        {"model": {"layers": 3}}),
    "dropping_needs_capacity": ("drop", {"model": MOE | {"drop": "probs"}},
        {"model": {"capacity_factor": 1.0}}),
    "edp_is_whole": ("ep", {"model": MOE, "parallel": {"dp": 2, "ep": 4}}, {"parallel": {"dp": 4}}),
    "sequence_parallel_needs_tp": ("sequence_parallel", {"parallel": {"sequence_parallel": True}},
        {"parallel": {"tp": 2}}),
    "chunks_need_stages": ("pp_chunks",
        {"model": {"layers": 4}, "microbatches": 2, "parallel": {"pp_chunks": 2}},
        {"parallel": {"pp": 2}}),
    "dynamic_cp_ascends": ("dynamic_cp", {"parallel": {"dp": 4, "dynamic_cp": (2, 1)}},
        {"parallel": {"dynamic_cp": (1, 2)}}),
    "dynamic_cp_fits": ("dynamic_cp", {"parallel": {"dp": 2, "cp": 2, "dynamic_cp": (1, 8)}},
        {"parallel": {"dynamic_cp": (1, 4)}}),
    "tp_divides_heads": ("parallel.tp",
        {"model": {"ffn": 159, "vocab_size": 255}, "parallel": {"tp": 3}},
        {"model": {"heads": 3, "kv_heads": 3, "head_dim": 8}}),
    "tp_divides_kv_heads": ("parallel.tp", {"parallel": {"tp": 4}}, {"model": {"kv_heads": 4}}),
    "tp_divides_ffn": ("parallel.tp", {"model": {"ffn": 161}, "parallel": {"tp": 2}},
        {"model": MOE, "parallel": {"sequence_parallel": True}}),
    "tp_divides_shared_expert_ffn": ("parallel.tp",
        {"model": MOE | {"shared_expert_ffn": 33},
        "parallel": {"tp": 2, "sequence_parallel": True}}, {"model": {"shared_expert_ffn": 0}}),
    "tp_divides_vocab_size": ("parallel.tp", {"model": {"vocab_size": 257}, "parallel": {"tp": 2}},
        {"model": {"vocab_size": 258}}),
    "sequence_parallel_cuts_seq": ("parallel.tp",
        {"model": {"seq": 33}, "parallel": {"tp": 2, "sequence_parallel": True}},
        {"parallel": {"sequence_parallel": False}}),
    "cp_cuts_seq": ("parallel.cp",
        {"model": {"seq": 12}, "parallel": {"cp": 2, "tp": 2, "sequence_parallel": True}},
        {"parallel": {"sequence_parallel": False}}),
    "dynamic_cp_cuts_seq": ("parallel.dynamic_cp",
        {"model": {"seq": 28}, "parallel": {"dp": 4, "dynamic_cp": (1, 2, 4)}},
        {"parallel": {"dynamic_cp": (1, 2)}}),
    "expert_axes_need_experts": ("parallel.etp", {"parallel": {"dp": 2, "etp": 2}}, {"model": MOE}),
    "ep_divides_experts": ("parallel.ep", {"model": MOE, "parallel": {"dp": 3, "ep": 3}},
        {"model": {"experts": 9}}),
    "etp_divides_expert_ffn": ("parallel.etp", {"model": MOE, "parallel": {"dp": 3, "etp": 3}},
        {"model": {"expert_ffn": 33}}),
    "experts_under_tp_need_sequence_parallel": ("parallel.sequence_parallel",
        {"model": MOE, "parallel": {"tp": 2, "ep": 2}}, {"parallel": {"ep": 1, "etp": 2}}),
    "stages_have_layers": ("parallel.pp", {"parallel": {"pp": 3}}, {"model": {"layers": 3}}),
    "interleaving_fills_rounds": ("microbatches",
        {"model": {"layers": 5}, "microbatches": 3, "parallel": {"pp": 2, "pp_chunks": 2}},
        {"microbatches": 4}),
    "scopes_are_known": ("graph", {"graph": ("atn",)}, {"graph": ("attn",)}),
    "scopes_differ": ("graph", {"graph": ("attn", "mlp", "attn")}, {"graph": ("attn", "mlp")}),
    "full_iteration_stands_alone": ("graph", {"graph": ("mlp", "full_iteration")},
        {"graph": ("full_iteration",)}),
    "layer_stands_alone": ("graph", {"graph": ("layer", "attn")}, {"graph": ("layer",)}),
    "moe_holds_its_stages": ("graph",
        {"model": MOE | {"capacity_factor": 1.0}, "graph": ("moe_router", "moe")},
        {"graph": ("attn", "moe")}),
    "preprocess_follows_router": ("graph", {"model": MOE, "graph": ("attn", "moe_preprocess")},
        {"graph": ("attn", "moe_router", "moe_preprocess")}),
    "scopes_need_experts": ("graph", {"graph": ("attn", "moe_router")}, {"model": MOE}),
    "mlp_needs_dense_ffn": ("graph", {"model": MOE, "graph": ("mlp",)},
        {"model": {"first_dense_layers": 1}}),
    "captured_experts_have_capacity": ("model.capacity_factor",
        {"model": MOE, "graph": ("full_iteration",)}, {"model": {"capacity_factor": 1.5}}),
    "optimizer_is_of_full_iteration": ("graph_optimizer",
        {"graph": ("attn",), "graph_optimizer": False}, {"graph": ("full_iteration",)}),
    "full_iteration_has_one_cp": ("parallel.dynamic_cp",
        {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}, "graph": ("full_iteration",)},
        {"graph": ("attn",)}),
    "captured_layers_are_a_range": ("graph_layers", {"graph": ("attn",), "graph_layers": (1, 0)},
        {"graph_layers": (0, 1)}),
    "full_iteration_has_all_layers": ("graph_layers",
        {"graph": ("full_iteration",), "graph_layers": (0, 1)}, {"graph": ("attn",)}),
    "every_stage_replays": ("graph_layers",
        {"parallel": {"pp": 2}, "graph": ("attn",), "graph_layers": (0, 1)},
        {"parallel": {"pp": 1}}),
    "libraries_capture_partial_scopes": ("capture_by",
        {"graph": ("full_iteration",), "capture_by": "te"}, {"graph": ("layer",)}),
    "libraries_check_no_guards": ("capture_by",
        {"graph": ("attn",), "capture_by": "torch", "compile": ("attn",)}, {"compile": ()}),
    "graphs_are_replayed": ("steps", {"graph": ("attn",), "steps": 2}, {"steps": 3}),
    "partial_scopes_need_stable_pool": ("fsdp.pool",
        {"graph": ("attn",), "fsdp": {"pool": "dynamic"}}, {"fsdp": {"strategy": "optim_grads"}}),
    "partial_scopes_need_persistence": ("fsdp.persistent_on_miss",
        {"graph": ("attn",), "fsdp": {"persistent_on_miss": False}},
        {"graph": ("full_iteration",)}),
    "fp8_needs_te": ("fp8", {"fp8": "current"}, {"backend": "te"}),
    "fp8_takes_widths": ("fp8", {"fp8": "block", "backend": "te", "model": {"ffn": 168}},
        {"model": {"ffn": 176}}),
    "fp8_takes_tokens": ("fp8", {"fp8": "delayed", "backend": "te", "model": {"seq": 24}},
        {"model": {"seq": 48}}),
    "evaluation_moves_no_scales": ("evaluate_every",
        {"evaluate_every": 2, "fp8": "delayed", "backend": "te"}, {"fp8": "current"}),
    "taps_are_patterns": ("taps", {"taps": ("layers.*.attn:outputs",)},
        {"taps": ("layers.*.attn:output",)}),
    "taps_differ": ("taps", {"taps": ("norm", "norm:output")}, {"taps": ("norm", "norm:input")}),
    "goes_on_after_it_resumed": ("resume_at", {"resume_at": 4, "steps": 4}, {"resume_at": 3}),
    "evaluates_once_at_least": ("evaluate_every",
        {"evaluate_every": 5, "steps": 4}, {"evaluate_every": 4}),
    "samples_are_numbered_by_rows": ("data.ranks",
        {"data": {"ranks": 2}, "parallel": {"dp": 2, "dynamic_cp": (1, 2)}},
        {"parallel": {"dynamic_cp": ()}}),
    "resumes_on_as_many_ranks": ("resume_from",
        {"resume_at": 1, "resume_from": {"tp": 2}, "parallel": {"dp": 4}}, {"resume_at": 0}),
    "resumes_on_the_same_samples": ("resume_from",
        {"resume_at": 1, "resume_from": {"dp": 2}, "parallel": {"tp": 2}, "microbatches": 3},
        {"microbatches": 4}),
    "layouts_draw_other_masks": ("model.dropout",
        {"resume_at": 1, "resume_from": {"pp": 2}, "parallel": {"dp": 2},
         "model": {"dropout": 0.1}}, {"model": {"dropout": 0.0}}),
    "layouts_have_other_scales": ("fp8",
        {"resume_at": 1, "resume_from": {"pp": 2}, "parallel": {"dp": 2}, "fp8": "current",
         "backend": "te"}, {"fp8": "none"}),
    "resumes_from_a_legal_layout": ("resume_from.tp",
        {"resume_at": 1, "resume_from": {"tp": 3}, "parallel": {"dp": 3}},
        {"resume_from": {"dp": 3, "tp": 1}}),
    "text_fits_vocabulary": ("model.vocab_size",
        {"model": {"vocab_size": 255}, "data": {"kind": "text"}}, {"model": {"vocab_size": 256}}),
    "recompute_is_eager_or_captured_whole": ("recompute",
        {"recompute": "full", "graph": ("attn",)}, {"recompute": "attn"}),
    "recompute_draws_outside_of_graphs": ("recompute",
        {"recompute": "full", "graph": ("layer",), "model": {"dropout": 0.1}},
        {"model": {"dropout": 0.0}}),
    "reentrant_recompute_is_eager": ("recompute",
        {"recompute": "attn_reentrant", "graph": ("mlp",)}, {"graph": ()}),
    "recompute_is_of_eager_torch": ("recompute", {"recompute": "attn", "compile": ("attn",)},
        {"compile": ()}),
    "fused_rope_is_one_kernel": (
        "fused_rope", {"fused_rope": True, "compile": ("attn",)}, {"compile": ()}),
    "fused_rope_has_positions_for_tails": (
        "micro_batch_size",
        {"fused_rope": True, "micro_batch_size": 2, "parallel": {"dp": 2, "dynamic_cp": (1, 2)}},
        {"micro_batch_size": 1}),
    "packs_have_tails": (
        "data.tail", {"data": {"tail": "hidden"}}, {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}}),
    "fused_experts_have_a_kernel": ("fused_experts", {"fused_experts": True}, {"model": MOE}),
}  # fmt: skip
KINDS: dict[str, Any] = {
    "model": ModelConfig, "parallel": ParallelConfig, "fsdp": FsdpConfig, "data": DataConfig,
    "resume_from": ParallelConfig,
}  # fmt: skip


def build(values: Values) -> TrainConfig:
    parts = {key: KINDS[key](**value) for key, value in values.items() if key in KINDS}
    return TrainConfig(**(values | parts))


def changed(values: Values, change: Values) -> Values:
    merged = {key: values.get(key, {}) | change.get(key, {}) for key in KINDS
              if key in values or key in change}  # fmt: skip
    return values | change | merged


IMPLIED = {"tp_divides_heads": {"tp_divides_kv_heads"}}
"""What is broken beside a rule whatever one does: key-value heads divide query heads."""


def unchecked(kind: Any, values: Values) -> Any:
    """An instance with default values beside those given, which broke rules or not."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        value: Any = values.get(field.name, field.default)
        if value is dataclasses.MISSING:
            make: Any = field.default_factory
            value = make()
        object.__setattr__(made, field.name, value)
    return made


def test_an_example_breaks_its_rule_alone() -> None:
    """Without the checks that come first, no other rule says anything: none stands in for it."""
    for rule, (_, values, _) in EXAMPLES.items():
        parts = {key: unchecked(kind, values.get(key, {})) for key, kind in KINDS.items()}
        run = unchecked(TrainConfig, values | parts)
        found = {
            each.name
            for about, rules in RULES.items()
            for each in rules
            if broken([each], parts.get(about, run)) is not None
        }
        assert found == {rule} | IMPLIED.get(rule, set())


def test_the_examples_are_the_rules() -> None:
    """Each rule has an example and each example a rule; names are unique."""
    names = [rule.name for rules in RULES.values() for rule in rules]
    assert len(set(names)) == len(names)
    assert set(names) == set(EXAMPLES)


def test_a_broken_rule_is_named() -> None:
    """What breaks a rule is refused by its name, at the key; one change makes it legal.

    What is legal comes back equal from its plain form, through JSON text too.
    """
    for rule, (key, values, change) in EXAMPLES.items():
        found = None
        try:
            build(values)
        except ConfigError as error:
            found = error
        assert found is not None, rule
        assert (found.rule, found.key) == (rule, key)
        assert str(found).endswith(f"; rule: {rule}")
        legal = build(changed(values, change))
        plain = json.loads(json.dumps(legal.to_dict(), allow_nan=False))
        assert TrainConfig.from_dict(plain) == legal


def test_every_preset_is_legal_on_every_axis() -> None:
    """Eagerly and as one graph; attn but for pipelines."""
    legal: tuple[Values, ...] = (
        {"parallel": {"dp": 4, "dp_outer": 2}, "graph": ("attn",)},
        {"parallel": {"tp": 2, "cp": 2, "sequence_parallel": True}, "graph": ("attn",)},
        {"parallel": {"pp": 2, "tp": 2}, "graph": ("full_iteration",)},
        {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}, "graph": ("attn",)},
        {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}, "backend": "te"},
        {"parallel": {"dp": 2, "dynamic_cp": (1, 2)}, "backend": "te", "graph": ("attn",)},
        {"backend": "te", "fp8": "delayed", "graph": ("attn",)},
        {"model": MOE, "parallel": {"dp": 4, "ep": 2, "etp": 2}, "graph": ("attn",)},
    )
    for values in legal:
        build(values)
    for preset in MODEL_PRESETS:
        TrainConfig(model=model_from_preset(preset))


def test_packs_are_padded_where_one_rank_has_them_whole() -> None:
    """Sequences of packs come in two halves on any number of ranks, on one too."""
    parallel = {"dynamic_cp": (1,)}
    with pytest.raises(ConfigError, match=r"2 \* size = 2 to divide seq=33"):
        TrainConfig.from_dict({"model": {"seq": 33}, "parallel": parallel})
    assert TrainConfig.from_dict({"model": {"seq": 34}, "parallel": parallel}).model.seq == 34


def test_the_first_steps_read_the_same_samples_in_their_layout() -> None:
    """As many microbatches over all ranks, eager, with nothing that is of the later steps."""
    given: Values = {"parallel": {"dp": 2, "tp": 2}, "resume_from": {"dp": 4}, "resume_at": 3,
                     "microbatches": 6, "graph": ("attn",), "stress": ("jitter",),
                     "taps": ("norm",), "evaluate_every": 1, "dtype": "fp32"}  # fmt: skip
    run = build(given)
    assert run.begins_elsewhere
    assert run.before_resuming() == build({
        "parallel": {"dp": 4}, "microbatches": 3, "dtype": "fp32", "data": {"ranks": 2}
    })  # fmt: skip
    assert TrainConfig.from_dict(run.to_dict()) == run
    assert not build(given | {"resume_at": 0}).begins_elsewhere
    assert not build(given | {"resume_from": {}}).begins_elsewhere


def test_packs_do_not_resume_from_another_layout() -> None:
    """On either side."""
    layouts = [{"dp": 2, "dynamic_cp": (1, 2)}, {"dp": 2}]
    for key, there in (("parallel", layouts), ("resume_from", layouts[::-1])):
        with pytest.raises(ConfigError) as caught:
            build({"resume_at": 1, "parallel": there[0], "resume_from": there[1]})
        found = caught.value.key, caught.value.rule
        assert found == (f"{key}.dynamic_cp", "resumes_on_the_same_samples")


def test_an_error_moves_into_its_part() -> None:
    """Seen from the run, the key of a part's error is dotted; everything else stays."""
    with pytest.raises(ConfigError) as caught:
        ModelConfig(heads=3)
    moved = caught.value.within("model")
    assert (moved.key, moved.rule) == ("model.heads", "heads_divide_hidden")
    assert str(moved) == f"model.{caught.value}"


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 720])
def test_divisors(number: int) -> None:
    """All of them, once, ascending."""
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


def test_tiny_presets_take_every_layout_of_the_matrix() -> None:
    """The presets for tests divide by each degree that tests of 8 ranks use."""
    for preset in ("dense_tiny", "moe_tiny", "mla_moe_tiny"):
        model = model_from_preset(preset)
        experts = {"ep": 8} if model.experts else {}
        for degrees in ({"dp": 8, **experts}, {"dp": 4, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2},
                        {"cp": 4}, {"tp": 2, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2},
                        {"dp": 8, "dynamic_cp": (1, 2, 4, 8)}, {"cp": 8}):  # fmt: skip
            sequence_parallel = "tp" in degrees
            parallel = ParallelConfig(**degrees, sequence_parallel=sequence_parallel)
            assert TrainConfig(model=model, parallel=parallel).parallel == parallel
    for ep, etp in ((2, 2), (4, 1), (8, 1), (1, 2)):
        for preset in ("moe_tiny", "mla_moe_tiny"):
            parallel = ParallelConfig(dp=8, ep=ep, etp=etp)
            TrainConfig(model=model_from_preset(preset), parallel=parallel)
    assert set(MODEL_PRESETS) >= {"qwen3_8b", "qwen3_30b_a3b", "moonlight_16b_a3b", "llama3_8b"}


OTHERS = ENGINES[1:]
TAKEN: dict[str, Any] = {
    "steps": 3, "microbatches": 2, "micro_batch_size": 2, "seed": 5, "flush_every": 2,
    "dtype": "fp32", "ledger": False, "stress_seed": 3, "taps": ("norm",), "graph_warmup_steps": 3,
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "graph": ("attn",), "graph_layers": (0, 1), "graph_optimizer": False, "capture_by": "te",
    "compile": ("attn",), "compile_backend": "aot_eager", "backend": "te", "fp8": "current",
    "evaluate_every": 2, "stress": ("jitter",), "recompute": "full", "resume_at": 1,
    "resume_from": ParallelConfig(pp=2),
    "fused_experts": True, "fused_rope": True, "skip_nonfinite": True,
}  # fmt: skip
PARTS = ("model", "parallel", "fsdp", "optim", "data", "engine")


def test_every_field_is_taken_or_refused() -> None:
    """A field that is added to the configuration must be decided on for other engines."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names == {*TAKEN, *REFUSED, *PARTS}


@pytest.mark.parametrize("engine", OTHERS)
def test_what_an_engine_would_ignore_is_refused(engine: str) -> None:
    """Each option that means nothing to it, by its key; what it takes is legal."""
    TrainConfig(engine=engine, **TAKEN)
    for key, value in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, **{key: value})
        assert caught.value.key == key
    for degrees in ({"dp_outer": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dynamic_cp": (1,)}):
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, parallel=ParallelConfig(dp=2, **degrees))
        assert caught.value.key == f"parallel.{next(iter(degrees))}"
        assert caught.value.rule == "other_engines_cut_over_dp"


@pytest.mark.parametrize(
    ("engine", "takes"),
    [("ddp", ()), ("megatron_fsdp", ("reduce_dtype",)),
     ("fsdp2", ("reduce_dtype", "reshard_after_forward"))],
)  # fmt: skip
def test_options_of_sharding(engine: str, takes: tuple[str, ...]) -> None:
    """Strategies and pools are of our engine; an engine takes what it has an option for."""
    others: dict[str, Any] = {
        "strategy": "optim", "outer_strategy": "optim", "pool": "traced",
        "persistent_on_miss": False, "reshard_after_forward": False, "reduce_dtype": "bf16",
        "overlap": 0,
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(FsdpConfig)}
    for key, value in others.items():
        fsdp = FsdpConfig(**{key: value})
        if key in takes:
            assert TrainConfig(engine=engine, fsdp=fsdp).fsdp == fsdp
            continue
        with pytest.raises(ConfigError) as caught:
            TrainConfig(engine=engine, fsdp=fsdp)
        assert (caught.value.key, caught.value.rule) == (
            f"fsdp.{key}", "other_engines_shard_their_way"
        )  # fmt: skip


EVEN = ModelConfig(hidden=128, heads=8, kv_heads=4, head_dim=32, ffn=256, seq=64)


def eight_bits(model: ModelConfig = EVEN, fp8: str = "current", **options: Any) -> TrainConfig:
    degrees = options.pop("parallel", {})
    return TrainConfig(
        model=model, fp8=fp8, backend="te", parallel=ParallelConfig(**degrees), **options
    )


@pytest.mark.parametrize("fp8", EIGHT_BITS)
def test_every_recipe_is_taken(fp8: str) -> None:
    """A recipe with even widths is legal, and goes through plain values and back."""
    config = eight_bits(fp8=fp8, parallel={"tp": 2, "cp": 2, "sequence_parallel": True})
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "degrees", "said"),
    [
        ({"hidden": 120}, {}, "hidden = 120"),
        ({"head_dim": 34}, {"tp": 2}, "heads * head_dim = 272 over tp=2"),
        ({"head_dim": 36}, {"tp": 4}, "heads * head_dim = 288 over tp=4"),
        ({"head_dim": 8}, {"tp": 4}, "kv_heads * head_dim = 32 over tp=4"),
        ({"ffn": 248}, {}, "ffn = 248"),
        ({"ffn": 240}, {"tp": 2}, "ffn = 240 over tp=2"),
        ({"experts": 4, "top_k": 2, "expert_ffn": 48}, {"dp": 2, "etp": 2},
         "expert_ffn = 48 over etp=2"),
        ({"experts": 4, "top_k": 2, "expert_ffn": 64, "shared_expert_ffn": 24}, {},
         "shared_expert_ffn = 24"),
    ],
)  # fmt: skip
def test_uneven_widths_are_named(
    change: dict[str, Any], degrees: dict[str, int], said: str
) -> None:
    """The error says which width it is, and the degree that made it uneven."""
    model = dataclasses.replace(EVEN, **change)
    degrees = degrees | ({"sequence_parallel": True} if degrees.get("tp", 1) > 1 else {})
    with pytest.raises(ConfigError) as caught:
        eight_bits(model, parallel=degrees)
    assert said in str(caught.value)
    assert (caught.value.key, caught.value.rule) == ("fp8", "fp8_takes_widths")
    assert eight_bits(model, fp8="none", parallel=degrees).fp8 == "none"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank = 24"),
        ({"q_lora_rank": 40}, "q_lora_rank = 40"),
        ({"v_head_dim": 6}, "v_head_dim = 24 over tp=2"),
        ({"qk_nope_head_dim": 18, "qk_rope_head_dim": 14}, "qk_nope_head_dim = 72 over tp=2"),
    ],
)
def test_latents_have_widths_too(change: dict[str, Any], said: str) -> None:
    """MLA multiplies by its latents; the narrow key part is left out of fp8."""
    even = {
        "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "heads": 4, "kv_heads": 4, "first_dense_layers": 0,
    }  # fmt: skip
    parallel = {"tp": 2, "sequence_parallel": True}
    assert eight_bits(model_from_preset("mla_moe_tiny", even), parallel=parallel).fp8 == "current"
    with pytest.raises(ConfigError) as caught:
        eight_bits(model_from_preset("mla_moe_tiny", even | change), parallel=parallel)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("seq", "parallel", "said"),
    [
        (24, {}, "24 tokens over cp=1"),
        (48, {"cp": 2}, "48 tokens over cp=2"),
        (32, {"cp": 2, "tp": 2, "sequence_parallel": True}, "32 tokens over cp=2, tp=2"),
        (32, {"dp": 4, "dynamic_cp": (1, 2, 4)}, "32 tokens over cp=4"),
    ],
)
def test_uneven_tokens_are_named(seq: int, parallel: dict[str, Any], said: str) -> None:
    """Tokens of a rank are a side of a product as well, for every cp that there may be."""
    with pytest.raises(ConfigError) as caught:
        eight_bits(dataclasses.replace(EVEN, seq=seq), parallel=parallel)
    assert said in str(caught.value)
    assert caught.value.rule == "fp8_takes_tokens"
    options: dict[str, Any] = {"micro_batch_size": 4}
    assert (
        eight_bits(dataclasses.replace(EVEN, seq=seq), parallel=parallel, **options).fp8
        == "current"
    )


NAMES = (
    "embedding", "layers.0", "layers.0.attn", "layers.0.attn.norm", "layers.10.attn",
    "layers.10.mlp.moe.router", "norm", "head",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "meant"),
    [
        ("norm", "output", ["norm"]),
        ("norm:gradient", "gradient", ["norm"]),
        ("layers.0.attn.norm", "output", ["layers.0.attn.norm"]),
        ("layers.*:input", "input", ["layers.0"]),
        ("layers.*.attn:output", "output", ["layers.0.attn", "layers.10.attn"]),
        ("layers.1*.attn", "output", ["layers.10.attn"]),
        ("layers.10.**", "output", ["layers.10.attn", "layers.10.mlp.moe.router"]),
        ("**.norm", "output", ["layers.0.attn.norm"]),
        ("**", "output", list(NAMES)),
        ("*", "output", ["embedding", "norm", "head"]),
        ("norm.norm", "output", []),
    ],
)
def test_a_pattern_means_names(text: str, kind: str, meant: list[str]) -> None:
    """One star is one part of a name, two are any number; a dot is a dot; output is understood."""
    pattern = tap_pattern(text)
    assert pattern.kind == kind
    assert [name for name in NAMES if pattern.matches(name)] == meant
    assert not pattern.matches("layers_0_attn_norm") or text.startswith("*")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("norm:grad", "input, output or gradient after the colon"),
        ("norm:", "input, output or gradient after the colon"),
        ("norm:output:input", "input, output or gradient after the colon"),
        (":output", "a module's dotted name"),
        ("", "a module's dotted name"),
        ("layers..attn", "a module's dotted name"),
        ("layers.[01]", "a module's dotted name"),
    ],
)
def test_what_is_no_pattern_is_refused(text: str, why: str) -> None:
    """A run that would look into nothing, or elsewhere, is refused by the key and the reason."""
    with pytest.raises(ConfigError, match=f"^taps: expected {why}"):
        TrainConfig(taps=(text,))


def test_captured_layers_are_in_the_range_and_have_the_part() -> None:
    """Both ends of the range; `mlp` is of dense layers, scopes of experts are of the others."""
    run = build({"model": MOE | {"layers": 5, "first_dense_layers": 3}, "graph": ("attn",),
                 "graph_layers": (1, 3)})  # fmt: skip
    found = {scope: captured_layers(run, scope) for scope in ("attn", "mlp", "moe_router")}
    assert found == {"attn": [1, 2, 3], "mlp": [1, 2], "moe_router": [3]}


def test_every_partial_scope_begins_somewhere() -> None:
    """At a layer or a part of it; but for the one that goes on where another ends."""
    assert set(BEGINS_AT) == set(SCOPES) - {"full_iteration", "moe_preprocess"}


def test_sets_of_scopes_are_those_of_the_model() -> None:
    """All that rules allow together, and none that the model lacks."""
    dense = {("attn",), ("mlp",), ("attn", "mlp"), ("layer",), ("full_iteration",)}
    assert set(scope_sets(ModelConfig())) == dense
    dropless = scope_sets(ModelConfig(**MOE, first_dense_layers=1))
    assert ("attn", "mlp", "moe_router", "moe_preprocess") in dropless
    assert not {"moe", "layer", "full_iteration"} & {scope for each in dropless for scope in each}


def test_all_rules_are_printed() -> None:
    """`python -m fsdp_core.config`: names and messages, a row each."""
    assert list(printed.rows())[2:] == [
        f"| {about} | `{rule.name}` | {rule.message} |"
        for about, rules in RULES.items()
        for rule in rules
    ]
