"""What torch.compile compiles of a layer, and what cannot go with it.

    attn              a layer's attention branch
    mlp               a layer's dense feed-forward branch
    moe_router        of an expert layer: norm, router, shared experts
    moe_preprocess    after moe_router: what the dispatcher works out before tokens travel
    experts           the experts' feed-forward, drop and pad
    layer             a whole layer, of a model without experts

Parts are those of graph scopes, so a graph holds a part (*inside*) or has it in the eager rest
around it (*beside*); it never cuts one. They are compiled whether or not there are graphs, so that
a graphed run is compared with the eager run of the same compiled parts. No part has an FSDP unit
inside, so FSDP's hooks are never compiled: they run around parts.

A compiled part is another program than its Python: operators are fused, bits may differ.
"""

from typing import Protocol

from fsdp_core.config.rule import ConfigError, Rule
from fsdp_core.config.scopes import Graphed

PARTS = ("attn", "mlp", "moe_router", "moe_preprocess", "experts", "layer")
COMPILERS = ("inductor", "aot_eager")
"""`aot_eager` traces as `inductor` does, and runs torch's operators: it needs no C++ compiler."""
NO_COMPILE = "none"
_EXPERT_PARTS = ("moe_router", "moe_preprocess", "experts")


class Compiled(Graphed, Protocol):
    """What the rules of compiled parts look at: `TrainConfig` is one."""

    @property
    def compile(self) -> tuple[str, ...]:
        """Parts; empty means none."""

    @property
    def compile_backend(self) -> str:
        """One of `COMPILERS`."""

    @property
    def backend(self) -> str:
        """Whose kernels layers use."""

    @property
    def stress(self) -> tuple[str, ...]:
        """Stressors."""


def _error(run: Compiled, expected: str, legal: tuple[object, ...] = ()) -> ConfigError:
    return ConfigError("compile", expected=expected, got=list(run.compile), legal=legal)


def _parts_are_known(run: Compiled) -> ConfigError | None:
    for part in run.compile:
        if part not in PARTS:
            legal = (NO_COMPILE, *PARTS)
            return ConfigError("compile", expected="parts of layers", got=part, legal=legal)
    return None


def _parts_differ(run: Compiled) -> ConfigError | None:
    if len(set(run.compile)) == len(run.compile):
        return None
    return _error(run, "each part once")


def _layer_is_compiled_alone(run: Compiled) -> ConfigError | None:
    if "layer" not in run.compile or len(run.compile) == 1:
        return None
    return _error(run, "layer alone, it holds its branches")


def _compiled_layers_have_no_experts(run: Compiled) -> ConfigError | None:
    if "layer" not in run.compile or not run.model.experts:
        return None
    expected = "branches of layers one by one, as experts are an FSDP unit inside of theirs"
    return _error(run, expected, tuple(part for part in PARTS if part != "layer"))


def _preprocess_is_compiled_with_router(run: Compiled) -> ConfigError | None:
    if "moe_preprocess" not in run.compile or "moe_router" in run.compile:
        return None
    return _error(run, "moe_router beside moe_preprocess, which goes on with its outputs")


def _compiled_parts_exist(run: Compiled) -> ConfigError | None:
    of_experts = [part for part in run.compile if part in _EXPERT_PARTS]
    if of_experts and not run.model.experts:
        return _error(run, f"no part {of_experts[0]}, as the model has no experts")
    if "mlp" in run.compile and not run.model.has_dense_ffn:
        return _error(run, "no part mlp, as every layer has experts")
    return None


def _compiled_experts_have_capacity(run: Compiled) -> ConfigError | None:
    if "experts" not in run.compile or run.model.capacity_factor is not None:
        return None
    return ConfigError(
        "model.capacity_factor",
        expected="a number > 0 (drop and pad), as compiled experts take rows of one shape",
        got=None,
    )


def _graphs_cut_no_compiled_part(run: Compiled) -> ConfigError | None:
    scopes, parts = set(run.graph), set(run.compile)
    if "layer" in parts and scopes & {"attn", "mlp"}:
        return _error(run, "attn and mlp one by one, as graph scopes would cut a compiled layer")
    router = {"moe_router", "moe_preprocess"}
    if not scopes & router or not parts & router or scopes & router == parts & router:
        return None
    return _error(
        run,
        "+".join(scope for scope in run.graph if scope in router)
        + ", as captured, since a graph holds what is compiled of a router whole and alone",
    )


def _compiled_parts_have_one_cp(run: Compiled) -> ConfigError | None:
    if not run.compile or not run.parallel.dynamic_cp:
        return None
    return ConfigError(
        "parallel.dynamic_cp",
        expected="no sizes, as compiled parts are made for one",
        got=run.parallel.dynamic_cp,
    )


def _compiled_parts_are_torchs(run: Compiled) -> ConfigError | None:
    if not run.compile or run.backend == "torch":
        return None
    return ConfigError(
        "backend",
        expected="torch, as TransformerEngine's modules keep the compiler out",
        got=run.backend,
        legal=("torch",),
    )


def _races_see_operators(run: Compiled) -> ConfigError | None:
    if not run.compile or run.compile_backend != "inductor" or "races" not in run.stress:
        return None
    return ConfigError(
        "stress",
        expected="no races with compile_backend inductor, whose kernels are no operators",
        got=list(run.stress),
        legal=("jitter", "poison", "scramble"),
    )


COMPILE_RULES: tuple[Rule[Compiled], ...] = (
    Rule("parts_are_known", "A compiled part is one of the names above.", _parts_are_known),
    Rule("parts_differ", "No part is named twice.", _parts_differ),
    Rule("layer_is_compiled_alone", "layer holds a layer's branches.", _layer_is_compiled_alone),
    Rule("compiled_layers_have_no_experts",
         "Experts are an FSDP unit of their own, whose hooks would be in the middle of the code.",
         _compiled_layers_have_no_experts),
    Rule("preprocess_is_compiled_with_router", "moe_preprocess goes on where moe_router ends.",
         _preprocess_is_compiled_with_router),
    Rule("compiled_parts_exist", "What is compiled must be in the model.", _compiled_parts_exist),
    Rule("compiled_experts_have_capacity",
         "Shapes are constants of compiled code: experts are drop and pad.",
         _compiled_experts_have_capacity),
    Rule("graphs_cut_no_compiled_part",
         "A graph holds compiled code whole, or has it beside.", _graphs_cut_no_compiled_part),
    Rule("compiled_parts_have_one_cp",
         "Dynamic cp chooses a size a microbatch, which compiled code has for a constant.",
         _compiled_parts_have_one_cp),
    Rule("compiled_parts_are_torchs",
         "TransformerEngine's modules are compiled already, and keep the compiler out.",
         _compiled_parts_are_torchs),
    Rule("races_see_operators",
         "The stressor races sees operators; inductor's kernels are none.", _races_see_operators),
)  # fmt: skip
