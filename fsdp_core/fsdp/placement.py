"""What is cut over which mesh axis: strategies spelled out as placements. Pure, no torch.

Three things of a parameter group can be whole or cut on each mesh axis:

    strategy              weight at rest   gradient between microbatches   main weight, optimizer
    no_shard              whole            whole                           whole
    optim (ZeRO-1)        whole            whole                           cut
    optim_grads (ZeRO-2)  whole            cut                             cut
    optim_grads_params    cut              cut                             cut

A mesh of two axes takes a strategy for each: ("no_shard", "optim_grads_params") is HSDP,
("optim", "optim_grads_params") is HFSDP (Megatron's name: weights cut inside a node, optimizer
state over all nodes).

All cuts nest. The flat buffer of a group is cut over one axis after another, in the order `nest`;
level k is what is left after the first k axes, a contiguous slice. So weight, gradient and main
weight are each known by a level, and collectives go from one level to the next on one axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.config import STRATEGIES


@dataclass(frozen=True)
class Placements:
    """Which of weight, gradient and main weight is cut over each mesh axis, outermost axis first.

    Raises:
        ValueError: lengths differ, or on some axis the weight is cut and the gradient is not, or
            the gradient is cut and the main weight is not.
    """

    weight: tuple[bool, ...]
    grad: tuple[bool, ...]
    main: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not len(self.weight) == len(self.grad) == len(self.main):
            raise ValueError(f"Expected one entry a mesh axis in each of the three, got {self}.")
        for axis, cut in enumerate(zip(self.weight, self.grad, self.main, strict=True)):
            if list(cut) != sorted(cut):
                raise ValueError(
                    "Expected the gradient cut wherever the weight is, and the main weight "
                    f"wherever the gradient is, got {self} on mesh axis {axis}."
                )

    @property
    def nest(self) -> tuple[int, ...]:
        """Mesh axes that cut anything, coarsest first: those of the weight, then the rest's.

        Ties go to the last axis, which is the innermost and fastest of a mesh.
        """
        axes = [axis for axis, cut in enumerate(self.main) if cut]
        depth = [self.weight[a] + self.grad[a] for a in axes]
        return tuple(a for _, a in sorted(zip(depth, axes, strict=True), reverse=True))

    @property
    def levels(self) -> tuple[int, int, int]:
        """Levels of weight, gradient and main weight: how many axes of `nest` cut each."""
        return sum(self.weight), sum(self.grad), sum(self.main)

    @property
    def replicated(self) -> tuple[int, ...]:
        """Mesh axes over which even the main weight is whole: gradients are all-reduced there."""
        return tuple(axis for axis, cut in enumerate(self.main) if not cut)


def placements_of(strategy: str | Sequence[str], num_axes: int) -> Placements:
    """Placements of a strategy, or of one strategy a mesh axis, outermost first.

    One name on a mesh of two axes means that name on the inner axis and `no_shard` on the outer.

    Raises:
        ValueError: unknown name, or not one name an axis.
    """
    outer = ("no_shard",) * (num_axes - 1)
    names = (*outer, strategy) if isinstance(strategy, str) else tuple(strategy)
    if len(names) != num_axes or any(name not in STRATEGIES for name in names):
        raise ValueError(
            f"Expected a strategy, or one for each of {num_axes} mesh axes, of {STRATEGIES}, "
            f"got {strategy!r}."
        )
    depths = [STRATEGIES.index(name) for name in names]
    return Placements(
        weight=tuple(depth >= 3 for depth in depths),
        grad=tuple(depth >= 2 for depth in depths),
        main=tuple(depth >= 1 for depth in depths),
    )
