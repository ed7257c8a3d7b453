"""What of a layer each partial graph scope captures, and what stays eager around it.

    scope            captured                                 eager around it
    attn             norm, attention, residual                the other branch
    mlp              norm, dense feed-forward, residual       attention
    moe_router       norm, router, shared experts             preprocess and what follows
    moe_preprocess   with it: where rows go                   dispatch, experts, combine, residual
    moe              a whole expert branch, drop and pad      attention
    layer            both branches                            nothing

x enters each of them, and x crosses to what is eager; of moe_router normed x, weights and numbers
of choices and the output of shared experts, too, and of moe_preprocess the plan.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fsdp_core.config import BEGINS_AT
from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.capture_session import PHASES, CaptureHooks, ExtractedHooks
from fsdp_core.graph.recorder import Ledger
from fsdp_core.model.batch import Part
from fsdp_core.model.decoder import Crossing, DecoderStage, Layer, MlpBranch, MoeBranch, Routed
from fsdp_core.model.moe.dispatcher import Plan

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class GraphUse:
    """What graphs of one scope of one layer did in one direction, in all slots and sizes. `layer`
    is -1 for full_iteration; `direction` is `forward` or `backward`, of full_iteration `gradients`,
    and `optimizer` if the graph writes every moment of the optimizer.
    """

    scope: str
    layer: int
    direction: str
    captures: int
    replays: int


def sum_uses(uses: Iterable[GraphUse]) -> list[GraphUse]:
    """One entry for each scope, layer and direction, in the order in which they come."""
    found: dict[tuple[str, int, str], GraphUse] = {}
    for use in uses:
        key = (use.scope, use.layer, use.direction)
        before = found.get(key, GraphUse(*key, 0, 0))
        found[key] = GraphUse(*key, before.captures + use.captures, before.replays + use.replays)
    return list(found.values())


@dataclass
class GraphCounts:
    """What the graphs of a run did, and the memory that they use and do not own. External storages
    are named by their owners, or by the operator and place that used them first.
    """

    captured: int = 0
    replays: int = 0
    external_names: list[str] = field(default_factory=list)
    external_places: list[str] = field(default_factory=list)
    unnamed_externals: int = 0

    def enter(self, ledgers: Sequence[Ledger]) -> None:
        for ledger in ledgers:
            self.external_names.extend(ledger.names)
            self.external_places.extend(ledger.places)
            self.unnamed_externals += ledger.num_unnamed

    def launched(self) -> None:
        self.replays += 1


def _whole(outputs: Outputs) -> torch.Tensor:
    """Of regions that have no eager rest."""
    assert isinstance(outputs, torch.Tensor)
    return outputs


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a layer that is captured by itself.

    name: `layers.3.attn`.
    scopes: that it is captured by.
    number: of its layer, an FSDP unit, in the model.
    owner: the module whose forward takes x and a part, and which the replay stands in for.
    modules: what of it is captured.
    run: x [B, T, H] and the part to what crosses.
    rest: what crossed to the owner's output [B, T, H], eagerly.
    bypassed: modules that eager training calls, and a replay does not; theirs are no parts.
    """

    name: str
    scopes: tuple[str, ...]
    number: int
    layer: Layer
    owner: nn.Module
    modules: tuple[nn.Module, ...]
    run: Callable[[torch.Tensor, Part], Outputs]
    rest: Callable[[Outputs], torch.Tensor] = _whole
    bypassed: tuple[nn.Module, ...] = ()

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[CaptureHooks]:
        """Capture inside: hooks are off; yields what they do at capture time, by phase.
        `ValueError` for hooks that no replay would run, or kernels that add to gradients' buffers,
        which may move.
        """
        for module in nn.ModuleList(self.modules).modules():
            if getattr(module, "fuse_wgrad_accumulation", False):
                raise ValueError(
                    f"Expected {self.name} without fuse_wgrad_accumulation in a partial scope, got "
                    f"it in a {type(module).__name__}: its kernels add to FSDP's gradient buffers, "
                    "which may move between replays. Leave it off, or capture full_iteration."
                )
        for module in self.bypassed:
            if any(getattr(module, f"_{phase}") for phase in PHASES):
                raise ValueError(
                    f"Expected no hooks of the {type(module).__name__} of {self.name}, got some: "
                    "a part of it is captured, and replays do not call it."
                )
        # Hooks of the owner run around every replay, those of anything else would be lost.
        whole = self.modules == (self.owner,)
        with ExtractedHooks(self.owner if whole else nn.ModuleList(self.modules)) as extracted:
            yield extracted.capture_hooks

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """That get gradients, as the modules hold them now: gathered, if they are."""
        found = (p for module in self.modules for p in module.parameters())
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def inner_units(self) -> list[Unit]:
        """FSDP units inside, outermost first: they act around the replay, none inside of it."""
        return [unit for unit in units_in(*self.modules) if self.layer not in unit.modules]

    @property
    def units(self) -> list[Unit]:
        return [*units_in(self.layer)[:1], *self.inner_units]

    def release(self) -> None:
        """Give gathered parameters back; nothing if none are."""
        for unit in reversed(self.units):
            unit.reshard()


def regions_in(
    stage: DecoderStage, scopes: Sequence[str], layers: Sequence[int] = ()
) -> Iterator[Region]:
    """The regions of a stage's layers, in the order in which they run. `layers` are the first and
    the last that are captured; empty for all.
    """
    for number, layer in stage.numbered_layers.items():
        if layers and not layers[0] <= int(number) <= layers[1]:
            continue
        branch = layer.mlp
        whole = {"layer": layer, "attn": layer.attn}
        whole |= {"mlp": branch} if isinstance(branch, MlpBranch) else {"moe": branch}
        for scope, module in whole.items():
            if scope in scopes:
                yield _forward_of(scope, number, layer, module)
        if isinstance(branch, MoeBranch) and "moe_router" in scopes:
            yield _front_of(number, layer, branch, plans="moe_preprocess" in scopes)


def refusal(regions: Iterable[Region]) -> str | None:
    """Why regions cannot be captured, as far as it shows before it is tried."""
    try:
        for region in regions:
            with region.without_hooks():
                pass
    except ValueError as error:
        return str(error)
    return None


def _name(scope: str, number: str) -> str:
    return f"layers.{number}.{BEGINS_AT[scope]}".rstrip(".")


def _forward_of(scope: str, number: str, layer: Layer, module: nn.Module) -> Region:
    # Not called as a module where it is the unit: hooks act around the replay.
    return Region(
        name=_name(scope, number), scopes=(scope,), number=int(number), layer=layer, owner=module,
        modules=(module,), run=module.forward,
    )  # fmt: skip


def _front_of(number: str, layer: Layer, branch: MoeBranch, *, plans: bool) -> Region:
    moe = branch.moe
    modules = [branch.norm, moe.router, *([moe.shared] if moe.shared is not None else [])]
    if plans:
        modules.append(moe.preprocess)

    def run(x: torch.Tensor, part: Part) -> Outputs:
        return _flat(branch.front(x, part, plans=plans))

    def rest(outputs: Outputs) -> torch.Tensor:
        assert isinstance(outputs, tuple)
        return branch.rest(_crossing(outputs, has_shared=moe.shared is not None))

    return Region(
        name=f"{_name('moe_router', number)} {'router and preprocess' if plans else 'router'}",
        scopes=("moe_router", "moe_preprocess") if plans else ("moe_router",),
        number=int(number),
        layer=layer,
        owner=branch,
        modules=tuple(modules),
        run=run,
        rest=rest,
        bypassed=(moe,),
    )


def _flat(crossing: Crossing) -> tuple[torch.Tensor, ...]:
    """Its tensors; `_crossing` is the inverse."""
    normed, (probs, experts, shared), plan, residual = crossing
    optional = () if shared is None else (shared,)
    return (normed, probs, experts, *optional, *(plan or ()), residual)


def _crossing(tensors: tuple[torch.Tensor, ...], *, has_shared: bool) -> Crossing:
    normed, probs, experts, *others, residual = tensors
    shared = others.pop(0) if has_shared else None
    plan = Plan(*others) if others else None
    return Crossing(normed, Routed(probs, experts, shared), plan, residual)
