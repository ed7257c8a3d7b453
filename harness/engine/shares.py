"""Which ranks of a run go on which node: blocks of neighbours, as even as they come.

world 8, 3 nodes:  [0 1 2] [3 4 5] [6 7]
"""

from dataclasses import dataclass

from harness.engine.slurm_options import SlurmOptions


@dataclass(frozen=True)
class Shares:
    """`num_nodes` nodes with at most `ranks_per_node` of `world_size` ranks each."""

    world_size: int
    num_nodes: int
    ranks_per_node: int

    def ranks(self, node: int) -> range:
        """Ranks of a node, never none.

        Raises:
            ValueError: no such node.
        """
        if not 0 <= node < self.num_nodes:
            raise ValueError(f"Expected a node below {self.num_nodes}, got {node}.")
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.world_size))


def share_out(world_size: int, options: SlurmOptions, device: str) -> Shares:
    """Spread a run over as few nodes as the options allow."""
    most = options.ranks_per_node
    if most is None and device == "cuda":
        most = options.gpus_per_node
    wanted = min(options.nodes, world_size)
    if most is not None:
        wanted = max(wanted, -(-world_size // most))
    each = -(-world_size // wanted)
    # Blocks of that size may fill fewer nodes than were asked for; none is left empty.
    return Shares(world_size, -(-world_size // each), each)
