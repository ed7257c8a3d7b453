"""The parts of a rank's layers that torch.compile compiles, each in place of its Python.

    attn, mlp, layer, experts    the module's `forward`: hooks, FSDP's too, run around it
    moe_router                   the branch's `front`; its `forward` is the front and its rest
    moe_preprocess               with it

What captures layers finds compiled parts where it finds their Python, and so do eager steps: both
run one program.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_core.config import ConfigError, TrainConfig
from fsdp_core.graph.compiled import Compilation, Compiler
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import Crossing, DecoderStage, Layer, MlpBranch, MoeBranch


def compile_parts(config: TrainConfig, stages: Sequence[DecoderStage]) -> Compiler:
    """Put compiled parts in place of those that `config.compile` names.

    Call it after everything that watches modules (taps) is in place.

    Returns:
        The compiler of all, to be closed after the graphs that hold its code; one that has nothing
        to do where nothing is compiled.

    Raises:
        ConfigError: taps watch modules inside of compiled parts.
    """
    if not config.compile:
        return Compiler()
    compiler = Compiler(config.compile_backend)
    for stage in stages:
        for number, layer in stage.numbered_layers.items():
            _compile_layer(compiler, f"layers.{number}", layer, config.compile)
    return compiler


def parts_compiled(
    config: TrainConfig, stages: Sequence[DecoderStage], compilations: Sequence[Compilation]
) -> tuple[str, ...]:
    """Those of `config.compile` for which the compiler made code, of any layer of the stages."""
    made = {found.part for found in compilations}
    found = set()
    for stage in stages:
        for number, layer in stage.numbered_layers.items():
            name = f"layers.{number}"
            found |= {part for part, path, _ in _whole_modules(layer) if name + path in made}
            if f"{name}.mlp router" in made:
                found.add("moe_router")
            if f"{name}.mlp router and preprocess" in made:
                found |= {"moe_router", "moe_preprocess"}
    return tuple(part for part in config.compile if part in found)


def _compile_layer(compiler: Compiler, name: str, layer: Layer, parts: Sequence[str]) -> None:
    for part, path, module in _whole_modules(layer):
        if part in parts:
            where = f"{name}{path}"
            _require_unwatched(where, *(inner for inner in module.modules() if inner is not module))
            module.forward = compiler.compile(where, module.forward)
    branch = layer.mlp
    if isinstance(branch, MoeBranch) and "moe_router" in parts:
        _compile_front(compiler, f"{name}.mlp", branch, plans="moe_preprocess" in parts)


def _whole_modules(layer: Layer) -> Iterator[tuple[str, str, nn.Module]]:
    """Parts that are all of a module's forward: the part, the path in the layer, the module."""
    yield "layer", "", layer
    yield "attn", ".attn", layer.attn
    if isinstance(layer.mlp, MlpBranch):
        yield "mlp", ".mlp", layer.mlp
    else:
        yield "experts", ".mlp.moe.experts", layer.mlp.moe.experts


def _compile_front(compiler: Compiler, name: str, branch: MoeBranch, *, plans: bool) -> None:
    moe = branch.moe
    inside = [branch.norm, moe.router, moe.preprocess, *([moe.shared] if moe.shared else [])]
    _require_unwatched(name, moe, *(each for module in inside for each in module.modules()))
    front = compiler.compile(f"{name} {'router and preprocess' if plans else 'router'}",
                             branch.front)  # fmt: skip

    def forward(x: torch.Tensor, part: Part) -> torch.Tensor:
        crossing: Crossing = front(x, part, plans=plans)
        return branch.rest(crossing)

    taken: Any = branch
    taken.front, taken.forward = front, forward


def _require_unwatched(name: str, *modules: nn.Module) -> None:
    """Taps count calls and digest in the middle of what would be one compiled function."""
    if any("_call_impl" in vars(module) for module in modules):
        raise ConfigError(
            "taps",
            expected=f"none inside of {name}, which is compiled: tap the module itself, or compile "
            "less",
            got="some",
        )
