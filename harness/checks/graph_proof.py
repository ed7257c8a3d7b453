"""What graphs owe: every scope of every layer captured, and replayed in each microbatch; and parts
that are to be compiled.

    scope            owed by a rank                            replays
    partial ones     each layer of its pipeline stages that    (steps - warm-up) x microbatches,
                     the scope captures, forward, backward     forward and backward each
    full_iteration   gradients; `optimizer` if it holds it     steps - warm-up

Captures are one at least: a pipeline has graphs for each slot, dynamic context parallelism for each
size. Replays are exact: one short is a microbatch that ran eagerly.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_core.config import TrainConfig
from fsdp_core.config.scopes import captured_layers, layers_with
from fsdp_core.parallel.pipeline_split import split_layers
from harness.records import Difference, Direction, EndRecord, GraphUse

WHOLE = "full_iteration"


@dataclass(frozen=True)
class Short:
    """Graphs that did not do what the configuration owes: a sentence, and which they are.

    `module` is the layer, "" of a whole step.
    """

    message: str
    difference: Difference
    module: str = ""


def owed(run: TrainConfig, rank: int, steps: int) -> list[GraphUse]:
    """The uses that a rank's end record must state; `captures` are the least."""
    number = max(steps - run.graph_warmup_steps, 1)
    if WHOLE in run.graph:
        ways: tuple[Direction, ...] = ("gradients", "optimizer")
        return [
            GraphUse(scope=WHOLE, layer=-1, direction=way, captures=1, replays=number)
            for way in ways[: 1 + run.graph_optimizer]
        ]
    mine = _layers_of(run, rank)
    both: tuple[Direction, ...] = ("forward", "backward")
    return [
        GraphUse(
            scope=scope, layer=layer, direction=direction, captures=1,
            replays=number * run.microbatches,
        )
        for scope in run.graph
        for layer in captured_layers(run, scope)
        if layer in mine
        for direction in both
    ]  # fmt: skip


def not_compiled(run: TrainConfig, rank: int, end: EndRecord) -> Short | None:
    """The first part that a rank was to compile and ran as Python; None if there is none.

    Layers share the code of a part, so each part is proven once a rank.
    """
    mine = _layers_of(run, rank)
    for part in run.compile:
        if part not in end.compiled and mine & set(layers_with(run.model, part)):
            message = f"{part} was to be compiled, and the compiler made no code of it"
            return Short(message, Difference(step=0, rank=rank, quantity="compiled", tensor=part))
    return None


def _layers_of(run: TrainConfig, rank: int) -> set[int]:
    """Layers of a rank's pipeline stages."""
    layout = run.parallel
    stages = split_layers(run.model.layers, layout.pp, layout.pp_chunks)
    return {layer for stage in stages[rank // layout.stage_size % layout.pp] for layer in stage}


def not_as_owed(run: TrainConfig, rank: int, steps: int, end: EndRecord) -> Short | None:
    """The first use of a rank that is not as owed, or that nobody asked for; None if there is none.

    Args:
        steps: that the run took.
    """
    found = {(use.scope, use.layer, use.direction): use for use in end.graphs}
    first = min(run.graph_warmup_steps, steps - 1)
    for due in owed(run, rank, steps):
        use = found.pop((due.scope, due.layer, due.direction), None)
        captures, replays = (use.captures, use.replays) if use is not None else (0, 0)
        if captures < due.captures:
            return _short(rank, first, due, "captures", captures, due.captures)
        if replays != due.replays:
            return _short(rank, first, due, "replays", replays, due.replays)
    if found:
        use = next(iter(found.values()))
        return _short(rank, first, use, "replays", use.replays, 0)
    if end.replays != (stated := launches(end.graphs)):
        message = f"graphs were launched {end.replays} times, their parts state {stated}"
        return Short(
            message,
            Difference(
                step=first, rank=rank, quantity="replays", reference=str(stated),
                candidate=str(end.replays),
            ),
        )  # fmt: skip
    return None


def launches(uses: Iterable[GraphUse]) -> int:
    """Launches in all; the graph of moe_preprocess is the router's, the optimizer's the step's."""
    return sum(
        use.replays
        for use in uses
        if use.scope != "moe_preprocess" and use.direction != "optimizer"
    )


def _short(rank: int, step: int, use: GraphUse, quantity: str, got: int, expected: int) -> Short:
    least = " at least" if quantity == "captures" else ""
    return Short(
        f"{use.name}: {got} {quantity}, expected {expected}{least}",
        Difference(
            step=step, rank=rank, quantity=f"{quantity}.{use.direction}", tensor=use.place,
            reference=str(expected), candidate=str(got),
        ),
        f"layers.{use.layer}" if use.layer >= 0 else "",
    )  # fmt: skip
