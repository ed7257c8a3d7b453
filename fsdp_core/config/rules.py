"""Words of a run, and one table of the rules that join its keys: `RUN_RULES`.

Graph scopes say what of a step is captured; docs/ARCHITECTURE.md has a table of them. All but
full_iteration are partial: FSDP gathers and reduces around them, into memory that must not move.

Parts that torch.compile compiles are those of scopes, and `experts` (the experts' feed-forward,
drop and pad). A graph holds a part or leaves it out, and never cuts one. No part has an FSDP unit
inside. Operators are fused, so bits may differ from eager ones.

Scales of fp8: `delayed` has one a tensor, from the largest values of earlier steps, `current` one
from its values now, `block` one each block of 128 or 128 x 128 values.

Stressors leave a right program's bits alone and break a wrong one.

    jitter      streams (CUDA) and ranks run early and late
    poison      what buffer pools hand out and take back is filled with NaN
    scramble    free memory moves between steps, and is filled with NaN
    races       accesses to memory that no wait orders are reported; on the CPU only

Engines shard the same decoder, over the same data and optimizer: `ours` is `fsdp_core.fsdp`,
`fsdp2` torch's `fully_shard`, `ddp` torch's `DistributedDataParallel`, `megatron_fsdp` the package.

Taps are patterns of module names, and what of them a run looks into. `*` is one part of a dotted
name, `**` any number of them.

    layers.*.attn:output       output of every attention branch
    layers.0.**:gradient       gradient of the output of everything in layer 0
    norm                       the same as norm:output
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.parallel import LAYOUT_RULES, Layout
from fsdp_core.config.rule import ConfigError, Rule, keep_defaults, obey, refuse

if TYPE_CHECKING:
    from fsdp_core.config.run import TrainConfig

EAGER = "eager"
CAPTURE_BY = ("ours", "te", "torch")
"""Who captures partial scopes; the others than ours are `make_graphed_callables` of a library."""
SCOPES = ("attn", "mlp", "moe_router", "moe_preprocess", "moe", "layer", "full_iteration")
BEGINS_AT: Mapping[str, str] = MappingProxyType(
    {"layer": "", "attn": "attn", "mlp": "mlp", "moe": "mlp", "moe_router": "mlp"}
)
"""Scopes that capture a layer from the input of one of its parts on: which, "" for all of it."""
NO_COMPILE = "none"
PARTS = ("attn", "mlp", "moe_router", "moe_preprocess", "experts", "layer")
COMPILERS = ("inductor", "aot_eager")
"""`aot_eager` traces as `inductor` does, and runs torch's operators: it needs no C++ compiler."""
EIGHT_BITS = ("none", "delayed", "current", "block")
NO_STRESS = "none"
STRESSORS = ("jitter", "poison", "scramble", "races")
ENGINES = ("ours", "fsdp2", "ddp", "megatron_fsdp")
TAP_KINDS = ("input", "output", "gradient")
_OF_EXPERTS = ("moe_router", "moe_preprocess", "moe", "experts")
_ROUTER = frozenset({"moe_router", "moe_preprocess"})


def _known(run: "TrainConfig", key: str, legal: tuple[str, ...], what: str) -> None:
    for name in getattr(run, key):
        if name not in legal:
            raise ConfigError(key, expected=what, got=name, legal=legal)


# --- graph scopes -----------------------------------------------------------------------------


def captured_layers(run: "TrainConfig", scope: str) -> list[int]:
    """Layers, of the whole model, that a partial scope captures; ascending."""
    first, last = run.graph_layers or (0, run.model.layers - 1)
    return [number for number in layers_with(run.model, scope) if first <= number <= last]


def layers_with(model: ModelConfig, part: str) -> list[int]:
    """Layers that have a part of that name: a partial scope, or `experts`."""
    has = dict.fromkeys(_OF_EXPERTS, True) | {"mlp": False}
    numbers = range(model.layers)
    return [n for n in numbers if part not in has or model.has_experts(n) is has[part]]


def _scopes_need_experts(run: "TrainConfig") -> None:
    scopes = [scope for scope in run.graph if scope in _OF_EXPERTS]
    if scopes and not run.model.experts:
        refuse(run, "graph", f"no scope {scopes[0]}, as the model has no experts")


def _captured_experts_have_capacity(run: "TrainConfig") -> None:
    scopes = [scope for scope in run.graph if scope in ("moe", "layer", "full_iteration")]
    if scopes and run.model.experts and run.model.capacity_factor is None:
        expected = f"a number > 0 (drop and pad), as the scope {scopes[0]} runs experts"
        refuse(run, "model.capacity_factor", expected)


def _gathers_into_stable_buffers(run: "TrainConfig") -> bool:
    """Whether parameters are gathered around a partial scope, to where the graph reads them."""
    partial = any(scope != "full_iteration" for scope in run.graph)
    return partial and "optim_grads_params" in (run.fsdp.strategy, run.fsdp.outer_strategy)


# --- compiled parts ---------------------------------------------------------------------------


def _compiled_parts_exist(run: "TrainConfig") -> None:
    of_experts = [part for part in run.compile if part in _OF_EXPERTS]
    if of_experts and not run.model.experts:
        refuse(run, "compile", f"no part {of_experts[0]}, as the model has no experts")
    if "mlp" in run.compile and not run.model.has_dense_ffn:
        refuse(run, "compile", "no part mlp, as every layer has experts")


def _graphs_cut_no_compiled_part(run: "TrainConfig") -> None:
    scopes, parts = set(run.graph), set(run.compile)
    if "layer" in parts and scopes & {"attn", "mlp"}:
        expected = "attn and mlp one by one, as graph scopes would cut a compiled layer"
        refuse(run, "compile", expected)
    if scopes & _ROUTER and parts & _ROUTER and scopes & _ROUTER != parts & _ROUTER:
        captured = "+".join(scope for scope in run.graph if scope in _ROUTER)
        why = "since a graph holds what is compiled of a router whole and alone"
        refuse(run, "compile", f"{captured}, as captured, {why}")


# --- fp8 --------------------------------------------------------------------------------------


def _fp8_takes_widths(run: "TrainConfig") -> None:
    for name, width, axis in _widths(run.model) if run.fp8 != "none" else ():
        ranks = getattr(run.parallel, axis) if axis else 1
        _fits_fp8(
            run, width, ranks, f"{name} = {width}" + (f" over {axis}={ranks}" if axis else "")
        )


def _fp8_takes_tokens(run: "TrainConfig") -> None:
    parallel, tokens = run.parallel, run.micro_batch_size * run.model.seq
    for size in parallel.dynamic_cp or (parallel.cp,):
        tp = parallel.tp if parallel.sequence_parallel else 1
        over = f"cp={size}" + (f", tp={tp}" if parallel.sequence_parallel else "")
        _fits_fp8(run, tokens, size * tp, f"micro_batch_size * seq = {tokens} tokens over {over}")


def _fits_fp8(run: "TrainConfig", total: int, ranks: int, what: str) -> None:
    if run.fp8 != "none" and total % (16 * ranks):
        refuse(run, "fp8", f"none, as {what} is no multiple of 16 on a rank", ("none",))


def _widths(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """Name, value and axis of all widths that a matrix product has; no axis: not cut."""
    yield "hidden", model.hidden, ""
    if model.attention == "mla":
        nope_rope = model.qk_nope_head_dim + model.qk_rope_head_dim
        yield "heads * (qk_nope_head_dim + qk_rope_head_dim)", model.heads * nope_rope, "tp"
        yield "heads * qk_nope_head_dim", model.heads * model.qk_nope_head_dim, "tp"
        yield "heads * v_head_dim", model.heads * model.v_head_dim, "tp"
        yield "kv_lora_rank", model.kv_lora_rank, ""
        yield "q_lora_rank", model.q_lora_rank or 0, ""
    else:
        yield "heads * head_dim", model.heads * model.head_dim, "tp"
        yield "kv_heads * head_dim", model.kv_heads * model.head_dim, "tp"
    if model.has_dense_ffn:
        yield "ffn", model.ffn, "tp"
    if model.experts:
        yield "expert_ffn", model.expert_ffn, "etp"
        yield "shared_expert_ffn", model.shared_expert_ffn, "tp"


# --- stressors, engines, taps -----------------------------------------------------------------


_OF_OURS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "": ("graph_layers", "capture_by", "graph_optimizer", "compile", "compile_backend", "backend",
         "stress", "recompute", "resume_at", "resume_from", "evaluate_every", "skip_nonfinite",
         "fused_rope"),
    "model": ("experts",),
})  # fmt: skip
"""Keys that mean something to our engine alone, by the part that has them."""
_TAKES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fsdp2": ("reshard_after_forward", "reduce_dtype"), "megatron_fsdp": ("reduce_dtype",)}
)
"""Of `fsdp`, what another engine takes, too."""


def _is_left_to_ours(run: "TrainConfig", part: str, takes: tuple[str, ...] = ()) -> None:
    if run.engine != "ours":
        owner = getattr(run, part) if part else run
        keys = _OF_OURS.get(part) or [field.name for field in dataclasses.fields(owner)]
        why = f"as engine is {run.engine}"
        keep_defaults(run, (key for key in keys if key not in takes), why, part)


class TapPattern(NamedTuple):
    """A pattern of module names, and `input`, `output` or `gradient`."""

    modules: str
    kind: str

    def matches(self, name: str) -> bool:
        wild = {"**": ".*", "*": r"[^.]*", ".": r"\."}
        expression = re.sub(r"\*\*|\*|\.", lambda found: wild[found[0]], self.modules)
        return re.fullmatch(expression, name) is not None


def tap_pattern(text: str) -> TapPattern:
    """What an entry of `taps` means (`ConfigError`: it is no pattern, or of no such kind)."""
    modules, colon, kind = text.partition(":")
    if not re.fullmatch(r"[\w*]+(\.[\w*]+)*", modules):
        expected = "a module's dotted name, with * for one part of it and ** for any"
        raise ConfigError("taps", expected=expected, got=text)
    if colon and kind not in TAP_KINDS:
        expected = "input, output or gradient after the colon"
        raise ConfigError("taps", expected=expected, got=text, legal=TAP_KINDS)
    return TapPattern(modules, kind or "output")


def _repeats(names: tuple[object, ...]) -> bool:
    return len(set(names)) < len(names)


# --- resuming from another layout -------------------------------------------------------------


def _resumes_on_other_ranks(run: "TrainConfig") -> None:
    if run.begins_elsewhere and run.resume_from.world_size != run.parallel.world_size:
        expected = f"a layout of {run.parallel.world_size} ranks, as parallel is"
        raise ConfigError("resume_from", expected=expected, got=run.resume_from.world_size)


def _resumes_on_other_samples(run: "TrainConfig") -> None:
    if not run.begins_elsewhere:
        return
    for key, layout in (("parallel", run.parallel), ("resume_from", run.resume_from)):
        if layout.dynamic_cp:
            refuse(run, f"{key}.dynamic_cp", "no sizes, as packs depend on the layout")
    number, ranks = run.microbatches * run.parallel.readers, run.resume_from.readers
    if number % ranks:
        expected = f"dp * dp_outer to divide a step's {number} microbatches, of all ranks"
        raise ConfigError("resume_from", expected=expected, got=ranks)


def _begins_in_an_illegal_layout(run: "TrainConfig") -> None:
    if run.begins_elsewhere:
        try:
            run.before_resuming()
        except ConfigError as error:
            error.key = error.key.replace("parallel.", "resume_from.")
            raise


RUN_RULES: Mapping[str, "tuple[Rule[TrainConfig], ...]"] = MappingProxyType({
    "graph": (
        Rule("scopes_are_known", "A graph scope is one of the names above.",
             lambda run: _known(run, "graph", (EAGER, *SCOPES), "graph scopes")),
        Rule("scopes_differ", "No scope is named twice.",
             lambda run: _repeats(run.graph), "graph", "each scope once"),
        Rule("full_iteration_stands_alone", "full_iteration holds every other scope.",
             lambda run: "full_iteration" in run.graph and len(run.graph) > 1,
             "graph", "full_iteration alone, it holds every other"),
        Rule("layer_stands_alone", "layer holds a layer's branches.",
             lambda run: "layer" in run.graph and len(run.graph) > 1,
             "graph", "layer alone, it holds its branches"),
        Rule("moe_holds_its_stages", "moe holds moe_router and moe_preprocess.",
             lambda run: "moe" in run.graph and _ROUTER & set(run.graph),
             "graph", "moe without moe_router and moe_preprocess, it holds both"),
        Rule("preprocess_follows_router", "moe_preprocess goes on where moe_router ends.",
             lambda run: _ROUTER & set(run.graph) == {"moe_preprocess"},
             "graph", "moe_router with moe_preprocess, which goes on with its outputs"),
        Rule("scopes_need_experts", "Scopes of experts need a model with experts.",
             _scopes_need_experts),
        Rule("mlp_needs_dense_ffn", "Scope mlp needs a layer with a dense feed-forward.",
             lambda run: "mlp" in run.graph and not run.model.has_dense_ffn,
             "graph", "no scope mlp, as every layer has experts"),
        Rule("captured_experts_have_capacity",
             "Dropless experts have shapes that depend on the data: captured ones drop and pad.",
             _captured_experts_have_capacity),
        Rule("optimizer_is_of_full_iteration",
             "Only full_iteration holds the optimizer's step, and may leave it out.",
             lambda run: not run.graph_optimizer and run.graph not in ((), ("full_iteration",)),
             "graph_optimizer", "true, as no partial scope holds the optimizer", (True,)),
        Rule("full_iteration_has_one_cp",
             "Dynamic cp chooses a size a microbatch, a graph of all microbatches has one.",
             lambda run: "full_iteration" in run.graph and run.parallel.dynamic_cp,
             "parallel.dynamic_cp",
             "no sizes, as the scope full_iteration fixes those of all microbatches"),
        Rule("captured_layers_are_a_range",
             "Layers to capture are named by the first and the last.",
             lambda run: run.graph_layers and not (
                 len(run.graph_layers) == 2
                 and run.graph_layers[0] <= run.graph_layers[1] < run.model.layers
             ), "graph_layers",
             "first and last layer, both below model.layers={0.model.layers}, or none for all"),
        Rule("full_iteration_has_all_layers", "full_iteration leaves no layer out.",
             lambda run: "full_iteration" in run.graph and run.graph_layers,
             "graph_layers", "none, as full_iteration holds all layers"),
        Rule("every_stage_replays", "Each stage of a pipeline replays graphs, or none does.",
             lambda run: run.graph_layers and run.parallel.pp > 1,
             "graph_layers", "none with a pipeline, as a stage without graphs replays nothing"),
        Rule("libraries_capture_partial_scopes",
             "make_graphed_callables takes modules, forward and backward, and no whole step.",
             lambda run: run.capture_by != "ours" and "full_iteration" in run.graph,
             "capture_by", "ours, as full_iteration is one graph of a whole step", ("ours",)),
        Rule("libraries_check_no_guards",
             "A graph of compiled code is stale once a guard fails; only our maker looks.",
             lambda run: run.capture_by != "ours" and run.graph and run.compile, "capture_by",
             "ours, as parts are compiled, whose guards no other maker checks", ("ours",)),
        Rule("graphs_are_replayed", "A graph that is never replayed proves nothing.",
             lambda run: run.graph and run.steps <= run.resume_at + run.graph_warmup_steps, "steps",
             "more than resume_at={0.resume_at} + graph_warmup_steps={0.graph_warmup_steps}, or no "
             "graph is ever replayed"),
        Rule("partial_scopes_need_stable_pool",
             "Partial scopes read gathered parameters where they were captured: no dynamic pool.",
             lambda run: run.fsdp.pool == "dynamic" and _gathers_into_stable_buffers(run),
             "fsdp.pool", "stable buffers for partial graph scopes", ("double", "traced")),
        Rule("partial_scopes_need_persistence",
             "A buffer that the pool did not plan must stay where it is, too.",
             lambda run: not run.fsdp.persistent_on_miss and _gathers_into_stable_buffers(run),
             "fsdp.persistent_on_miss", "true for partial graph scopes", (True,)),
    ),
    "compile": (
        Rule("parts_are_known", "A compiled part is one of the names above.",
             lambda run: _known(run, "compile", (NO_COMPILE, *PARTS), "parts of layers")),
        Rule("parts_differ", "No part is named twice.",
             lambda run: _repeats(run.compile), "compile", "each part once"),
        Rule("layer_is_compiled_alone", "layer holds a layer's branches.",
             lambda run: "layer" in run.compile and len(run.compile) > 1,
             "compile", "layer alone, it holds its branches"),
        Rule("compiled_layers_have_no_experts",
             "Experts are an FSDP unit of their own: its hooks would be in the middle of the code.",
             lambda run: "layer" in run.compile and run.model.experts, "compile",
             "branches of layers one by one, as experts are an FSDP unit inside of theirs",
             tuple(part for part in PARTS if part != "layer")),
        Rule("preprocess_is_compiled_with_router", "moe_preprocess goes on where moe_router ends.",
             lambda run: _ROUTER & set(run.compile) == {"moe_preprocess"},
             "compile", "moe_router with moe_preprocess, which goes on with its outputs"),
        Rule("compiled_parts_exist", "What is compiled must be in the model.",
             _compiled_parts_exist),
        Rule("compiled_experts_have_capacity",
             "Shapes are constants of compiled code: experts are drop and pad.",
             lambda run: "experts" in run.compile and run.model.capacity_factor is None,
             "model.capacity_factor",
             "a number > 0 (drop and pad), as compiled experts take rows of one shape"),
        Rule("graphs_cut_no_compiled_part", "A graph holds compiled code whole, or not at all.",
             _graphs_cut_no_compiled_part),
        Rule("compiled_parts_have_one_cp",
             "Dynamic cp chooses a size a microbatch, which compiled code has for a constant.",
             lambda run: run.compile and run.parallel.dynamic_cp,
             "parallel.dynamic_cp", "no sizes, as compiled parts are made for one"),
        Rule("compiled_parts_are_torchs",
             "TransformerEngine's modules are compiled already, and keep the compiler out.",
             lambda run: run.compile and run.backend != "torch",
             "backend", "torch, as TransformerEngine's modules keep the compiler out", ("torch",)),
        Rule("races_see_operators",
             "The stressor races sees operators; inductor's kernels are none.",
             lambda run: (
                 run.compile and run.compile_backend == "inductor" and "races" in run.stress
             ),
             "stress", "no races with compile_backend inductor, whose kernels are no operators",
             ("jitter", "poison", "scramble")),
    ),
    "fp8": (
        Rule("fp8_needs_te", "Only TransformerEngine computes in fp8.",
             lambda run: run.fp8 != "none" and run.backend != "te",
             "fp8", "none, as backend is {0.backend}", ("none",)),
        Rule("fp8_takes_widths", "Widths are multiples of 16 on every rank, for fp8's products.",
             _fp8_takes_widths),
        Rule("fp8_takes_tokens", "So are the tokens of a microbatch, whichever cp it has.",
             _fp8_takes_tokens),
    ),
    "stress": (
        Rule("stressors_are_known", "A stressor is one of the names above.",
             lambda run: _known(run, "stress", STRESSORS, "stressors")),
        Rule("stressors_differ", "No stressor is named twice.",
             lambda run: _repeats(run.stress), "stress", "each stressor once"),
    ),
    "engine": (
        Rule("other_engines_have_torch_parts",
             "Compiled parts, TransformerEngine and stressors are of our engine.",
             lambda run: _is_left_to_ours(run, "")),
        Rule("other_engines_graph_whole_steps",
             "Parameters that another engine gathers have no fixed address from step to step.",
             lambda run: run.engine != "ours" and run.graph not in ((), ("full_iteration",)),
             "graph", "eager or full_iteration, as engine is {0.engine}"),
        Rule("other_engines_cut_over_dp", "Other engines have dp alone.",
             lambda run: _is_left_to_ours(run, "parallel", ("dp",))),
        Rule("other_engines_shard_their_way",
             "Strategies and pools are of our engine; others take what they have an option for.",
             lambda run: _is_left_to_ours(run, "fsdp", _TAKES.get(run.engine, ()))),
    ),
    "taps": (
        Rule("taps_are_patterns", "A tap is a pattern of module names and what of them.",
             lambda run: not all(tap_pattern(text) for text in run.taps)),
        Rule("taps_differ", "No tap is asked for twice.",
             lambda run: _repeats(tuple(text.removesuffix(":output") for text in run.taps)),
             "taps", "each pattern once"),
    ),
    "run": (
        Rule("text_fits_vocabulary", "Text is read byte by byte: 256 tokens.",
             lambda run: run.data.kind == "text" and run.model.vocab_size < 256,
             "model.vocab_size", ">= 256 for byte-level text"),
        Rule("evaluation_moves_no_scales",
             "fp8's delayed scales follow each forward pass, those of an evaluation, too.",
             lambda run: run.evaluate_every and run.fp8 == "delayed",
             "evaluate_every", "0, as fp8 is delayed", (0,)),
        Rule("recompute_is_eager_or_captured_whole",
             "Graphs of parts of a layer are replayed once, so they hold no whole layer again.",
             lambda run: (
                 run.recompute.startswith("full")
                 and not {"layer", "full_iteration"} >= set(run.graph)
             ),
             "recompute", "none or attn, as graph scopes are parts of a layer"),
        Rule("recompute_draws_outside_of_graphs", "A graph cannot draw the same numbers twice.",
             lambda run: (
                 run.recompute != "none" and run.model.dropout
                 and {"attn", "layer", "full_iteration"} & set(run.graph)
             ),
             "recompute", "none, as graphs draw numbers of dropout={0.model.dropout} once"),
        Rule("reentrant_recompute_is_eager",
             "A reentrant checkpoint runs a backward pass of its own, which no graph can hold.",
             lambda run: run.recompute.endswith("_reentrant") and run.graph,
             "recompute", "none, full or attn, as graph is {0.graph}"),
        Rule("recompute_is_of_eager_torch",
             "Compilers and other makers decide what they keep; scales of fp8 would move twice.",
             lambda run: run.recompute != "none" and (
                 run.compile or run.fp8 != "none" or run.capture_by != "ours"
             ),
             "recompute",
             "none, as compile is {0.compile}, fp8 {0.fp8}, capture_by {0.capture_by}"),
        Rule("fused_experts_have_a_kernel",
             "Grouped products in blocks of fp8 have no fused kernel.",
             lambda run: run.fused_experts and (not run.model.experts or run.fp8 == "block"),
             "fused_experts", "false, as the model has no experts or fp8 is block"),
        Rule("fused_rope_is_one_kernel", "A compiler fuses what is not fused yet.",
             lambda run: run.fused_rope and run.compile,
             "fused_rope", "false, as compile is {0.compile}", (False,)),
        Rule("fused_rope_has_positions_for_tails",
             "A fused kernel turns the tail of a pack, too, by a table of seq positions.",
             lambda run: (
                 run.fused_rope and run.parallel.dynamic_cp and run.micro_batch_size > 1
             ),
             "micro_batch_size", "1, as fused_rope turns tails by a table of seq positions", (1,)),
        Rule("packs_have_tails", "Rows of one sequence each have no tail to hide.",
             lambda run: run.data.tail != "none" and not run.parallel.dynamic_cp,
             "data.tail", "none, as there is no dynamic_cp", ("none",)),
        Rule("goes_on_after_it_resumed",
             "A run that resumes after its last step shows nothing of it.",
             lambda run: run.resume_at >= run.steps, "resume_at", "less than steps={0.steps}"),
        Rule("evaluates_once_at_least", "A run that ends before its first evaluation shows none.",
             lambda run: run.evaluate_every > run.steps,
             "evaluate_every", "at most steps={0.steps}"),
        Rule("samples_are_numbered_by_rows", "Packs of dynamic cp are numbered without ranks.",
             lambda run: run.data.ranks and run.parallel.dynamic_cp,
             "data.ranks", "0, as parallel.dynamic_cp is {0.parallel.dynamic_cp}", (0,)),
        Rule("resumes_on_as_many_ranks", "Each rank that saves is followed by one that loads.",
             _resumes_on_other_ranks),
        Rule("resumes_on_the_same_samples",
             "A step's samples are dealt out in whole microbatches, in both layouts.",
             _resumes_on_other_samples),
        Rule("layouts_draw_other_masks", "Masks of dropout depend on the layout.",
             lambda run: run.begins_elsewhere and run.model.dropout,
             "model.dropout", "0, as resume_from is another layout", (0.0,)),
        Rule("layouts_have_other_scales", "Scales of fp8 depend on the layout.",
             lambda run: run.begins_elsewhere and run.fp8 != "none",
             "fp8", "none, as resume_from is another layout", ("none",)),
        Rule("resumes_from_a_legal_layout", "The first steps obey the rules of their layout.",
             _begins_in_an_illegal_layout),
    ),
})  # fmt: skip


def obey_all(run: "TrainConfig") -> None:
    """Check every rule about a run (`ConfigError`: of the first one that it breaks)."""
    obey(LAYOUT_RULES, Layout(run.model, run.parallel, run.microbatches))
    for rules in RUN_RULES.values():
        obey(rules, run)
