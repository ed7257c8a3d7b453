"""Graph scopes: what of a step is captured, and which combinations can be.

    attn              a layer's attention branch
    mlp               a layer's dense feed-forward branch
    moe_router        of an expert layer: norm, router, shared experts
    moe_preprocess    after moe_router: what the dispatcher works out before tokens travel
    moe               a whole expert branch
    layer             a whole layer
    full_iteration    all microbatches forward and backward; the optimizer's step, too, unless
                      `graph_optimizer` is false

All but the last are partial: FSDP gathers and reduces around them, so what it gathers must not
move. Where experts take as many tokens as are sent (dropless), shapes depend on the data, and
nothing that runs the experts can be captured.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from fsdp_core.config.model import ModelConfig
from fsdp_core.config.parallel import ParallelConfig
from fsdp_core.config.rule import ConfigError, Rule
from fsdp_core.config.sharding import FsdpConfig

SCOPES = (
    "attn", "mlp", "moe_router", "moe_preprocess", "moe", "layer", "full_iteration",
)  # fmt: skip
EAGER = "eager"
CAPTURE_BY = ("ours", "te", "torch")
"""Who captures partial scopes; the others than ours are `make_graphed_callables` of a library."""
BEGINS_AT: Mapping[str, str] = MappingProxyType(
    {"layer": "", "attn": "attn", "mlp": "mlp", "moe": "mlp", "moe_router": "mlp"}
)
"""Scopes that capture a layer from the input of one of its parts on: which, "" for all of it."""
_EXPERT_SCOPES = ("moe_router", "moe_preprocess", "moe")
_RUNS_EXPERTS = ("moe", "layer", "full_iteration")


class Graphed(Protocol):
    """What the rules of scopes look at: `TrainConfig` is one."""

    @property
    def model(self) -> ModelConfig:
        """Shapes."""

    @property
    def parallel(self) -> ParallelConfig:
        """Degrees."""

    @property
    def fsdp(self) -> FsdpConfig:
        """Sharding and buffers."""

    @property
    def graph(self) -> tuple[str, ...]:
        """Scopes; empty means eager."""

    @property
    def graph_layers(self) -> tuple[int, ...]:
        """First and last layer of which partial scopes are captured; empty: all."""

    @property
    def capture_by(self) -> str:
        """Who captures partial scopes."""

    @property
    def compile(self) -> tuple[str, ...]:
        """Parts that torch.compile compiles."""

    @property
    def steps(self) -> int:
        """Steps of the run."""

    @property
    def graph_warmup_steps(self) -> int:
        """Steps before the capture."""

    @property
    def graph_optimizer(self) -> bool:
        """Whether full_iteration holds the optimizer's step."""


def captured_layers(run: Graphed, scope: str) -> list[int]:
    """Layers, of the whole model, that a partial scope captures; ascending."""
    first, last = run.graph_layers or (0, run.model.layers - 1)
    return [number for number in layers_with(run.model, scope) if first <= number <= last]


def layers_with(model: ModelConfig, part: str) -> list[int]:
    """Layers that have a part of that name: a partial scope, or `experts`."""
    numbers = range(model.layers)
    if part == "mlp":
        return [number for number in numbers if not model.has_experts(number)]
    if part in (*_EXPERT_SCOPES, "experts"):
        return [number for number in numbers if model.has_experts(number)]
    return list(numbers)


def _error(run: Graphed, expected: str, legal: tuple[object, ...] = ()) -> ConfigError:
    return ConfigError("graph", expected=expected, got=list(run.graph), legal=legal)


def _scopes_are_known(run: Graphed) -> ConfigError | None:
    for scope in run.graph:
        if scope not in SCOPES:
            legal = (EAGER, *SCOPES)
            return ConfigError("graph", expected="graph scopes", got=scope, legal=legal)
    return None


def _scopes_differ(run: Graphed) -> ConfigError | None:
    if len(set(run.graph)) == len(run.graph):
        return None
    return _error(run, "each scope once")


def _full_iteration_stands_alone(run: Graphed) -> ConfigError | None:
    if "full_iteration" not in run.graph or len(run.graph) == 1:
        return None
    return _error(run, "full_iteration alone, it holds every other")


def _layer_stands_alone(run: Graphed) -> ConfigError | None:
    if "layer" not in run.graph or len(run.graph) == 1:
        return None
    return _error(run, "layer alone, it holds its branches")


def _moe_holds_its_stages(run: Graphed) -> ConfigError | None:
    if "moe" not in run.graph or not {"moe_router", "moe_preprocess"} & set(run.graph):
        return None
    return _error(run, "moe without moe_router and moe_preprocess, it holds both")


def _preprocess_follows_router(run: Graphed) -> ConfigError | None:
    if "moe_preprocess" not in run.graph or "moe_router" in run.graph:
        return None
    return _error(run, "moe_router beside moe_preprocess, which goes on with its outputs")


def _scopes_need_experts(run: Graphed) -> ConfigError | None:
    scopes = [scope for scope in run.graph if scope in _EXPERT_SCOPES]
    if run.model.experts or not scopes:
        return None
    return _error(run, f"no scope {scopes[0]}, as the model has no experts")


def _mlp_needs_dense_ffn(run: Graphed) -> ConfigError | None:
    if run.model.has_dense_ffn or "mlp" not in run.graph:
        return None
    return _error(run, "no scope mlp, as every layer has experts")


def _captured_experts_have_capacity(run: Graphed) -> ConfigError | None:
    scopes = [scope for scope in run.graph if scope in _RUNS_EXPERTS]
    if not run.model.experts or run.model.capacity_factor is not None or not scopes:
        return None
    return ConfigError(
        "model.capacity_factor",
        expected=f"a number > 0 (drop and pad), as the scope {scopes[0]} runs experts",
        got=None,
    )


def _optimizer_is_of_full_iteration(run: Graphed) -> ConfigError | None:
    if run.graph_optimizer or not run.graph or "full_iteration" in run.graph:
        return None
    return ConfigError(
        "graph_optimizer",
        expected="true, as no partial scope holds the optimizer",
        got=False,
        legal=(True,),
    )


def _full_iteration_has_one_cp(run: Graphed) -> ConfigError | None:
    if "full_iteration" not in run.graph or not run.parallel.dynamic_cp:
        return None
    return ConfigError(
        "parallel.dynamic_cp",
        expected="no sizes, as the scope full_iteration fixes those of all microbatches",
        got=run.parallel.dynamic_cp,
    )


def _captured_layers_are_a_range(run: Graphed) -> ConfigError | None:
    if not run.graph_layers:
        return None
    layers, bounds = run.model.layers, run.graph_layers
    if len(bounds) == 2 and bounds[0] <= bounds[1] < layers:
        return None
    expected = f"first and last layer, both below model.layers={layers}, or none for all"
    return ConfigError("graph_layers", expected=expected, got=list(bounds))


def _full_iteration_has_all_layers(run: Graphed) -> ConfigError | None:
    if "full_iteration" not in run.graph or not run.graph_layers:
        return None
    expected = "none, as full_iteration holds all layers"
    return ConfigError("graph_layers", expected=expected, got=list(run.graph_layers))


def _every_stage_replays(run: Graphed) -> ConfigError | None:
    if not run.graph_layers or run.parallel.pp == 1:
        return None
    expected = "none with a pipeline, as a stage without graphs would replay nothing"
    return ConfigError("graph_layers", expected=expected, got=list(run.graph_layers))


def _libraries_capture_partial_scopes(run: Graphed) -> ConfigError | None:
    if run.capture_by == "ours" or "full_iteration" not in run.graph:
        return None
    expected = "ours, as full_iteration is one graph of a whole step"
    return ConfigError("capture_by", expected=expected, got=run.capture_by, legal=("ours",))


def _libraries_check_no_guards(run: Graphed) -> ConfigError | None:
    if run.capture_by == "ours" or not run.graph or not run.compile:
        return None
    expected = "ours, as parts are compiled, whose guards no other maker checks"
    return ConfigError("capture_by", expected=expected, got=run.capture_by, legal=("ours",))


def _graphs_are_replayed(run: Graphed) -> ConfigError | None:
    if not run.graph or run.steps > run.graph_warmup_steps:
        return None
    return ConfigError(
        "steps",
        expected=f"more than graph_warmup_steps={run.graph_warmup_steps}, or no graph is "
        "ever replayed",
        got=run.steps,
    )


def _gathers_into_stable_buffers(run: Graphed) -> bool:
    """Whether parameters are gathered around a partial scope, to where the graph reads them."""
    partial = any(scope != "full_iteration" for scope in run.graph)
    return partial and "optim_grads_params" in (run.fsdp.strategy, run.fsdp.outer_strategy)


def _partial_scopes_need_stable_pool(run: Graphed) -> ConfigError | None:
    if run.fsdp.pool != "dynamic" or not _gathers_into_stable_buffers(run):
        return None
    return ConfigError(
        "fsdp.pool",
        expected="stable buffers for the partial graph scope " + "+".join(run.graph),
        got="dynamic",
        legal=("double", "traced"),
    )


def _partial_scopes_need_persistence(run: Graphed) -> ConfigError | None:
    if run.fsdp.persistent_on_miss or not _gathers_into_stable_buffers(run):
        return None
    return ConfigError(
        "fsdp.persistent_on_miss",
        expected="true for the partial graph scope " + "+".join(run.graph),
        got=False,
        legal=(True,),
    )


GRAPH_RULES: tuple[Rule[Graphed], ...] = (
    Rule("scopes_are_known", "A graph scope is one of the names above.", _scopes_are_known),
    Rule("scopes_differ", "No scope is named twice.", _scopes_differ),
    Rule("full_iteration_stands_alone", "full_iteration holds every other scope.",
         _full_iteration_stands_alone),
    Rule("layer_stands_alone", "layer holds a layer's branches.", _layer_stands_alone),
    Rule("moe_holds_its_stages", "moe holds moe_router and moe_preprocess.",
         _moe_holds_its_stages),
    Rule("preprocess_follows_router", "moe_preprocess goes on where moe_router ends.",
         _preprocess_follows_router),
    Rule("scopes_need_experts", "Scopes of experts need a model with experts.",
         _scopes_need_experts),
    Rule("mlp_needs_dense_ffn", "Scope mlp needs a layer with a dense feed-forward.",
         _mlp_needs_dense_ffn),
    Rule("captured_experts_have_capacity",
         "Dropless experts have shapes that depend on the data: what runs them is drop and pad.",
         _captured_experts_have_capacity),
    Rule("optimizer_is_of_full_iteration",
         "Only full_iteration holds the optimizer's step, and may leave it out.",
         _optimizer_is_of_full_iteration),
    Rule("full_iteration_has_one_cp",
         "Dynamic cp chooses a size a microbatch, a graph of all microbatches has one.",
         _full_iteration_has_one_cp),
    Rule("captured_layers_are_a_range", "Layers to capture are named by the first and the last.",
         _captured_layers_are_a_range),
    Rule("full_iteration_has_all_layers", "full_iteration leaves no layer out.",
         _full_iteration_has_all_layers),
    Rule("every_stage_replays", "Each stage of a pipeline replays graphs, or none does.",
         _every_stage_replays),
    Rule("libraries_capture_partial_scopes",
         "make_graphed_callables takes modules, forward and backward, and no whole step.",
         _libraries_capture_partial_scopes),
    Rule("libraries_check_no_guards",
         "A graph of compiled code is stale once a guard fails; only our maker looks.",
         _libraries_check_no_guards),
    Rule("graphs_are_replayed", "A graph that is never replayed proves nothing.",
         _graphs_are_replayed),
    Rule("partial_scopes_need_stable_pool",
         "Partial scopes read gathered parameters where they were captured: no dynamic pool.",
         _partial_scopes_need_stable_pool),
    Rule("partial_scopes_need_persistence",
         "A buffer that the pool did not plan must stay where it is, too.",
         _partial_scopes_need_persistence),
)  # fmt: skip
