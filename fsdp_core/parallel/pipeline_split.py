"""Which layers each rank of a pipeline has: as even as can be, or as the user says.

    10 layers, pp 4                      2 | 3 | 3 | 2
    the same, embedding and head count   2 | 3 | 3 | 2    12 pieces, 3 each
    9 layers, pp 2, chunks 2             2 | 2 | 3 | 2    ranks 0, 1, 0, 1

Standard library only, so that a laptop can check a layout.
"""

import itertools
from collections.abc import Sequence


def split_layers(
    num_layers: int,
    pp: int,
    chunks: int = 1,
    *,
    counts_embedding: bool = False,
    counts_head: bool = False,
    sizes: Sequence[int] | None = None,
) -> tuple[tuple[range, ...], ...]:
    """Numbers of the layers of every (rank, chunk), in the order of the model.

    Layers are dealt as evenly as can be. What does not divide goes to the later stages, which keep
    fewer microbatches, but to the last one only at the end: it has the head.

    Args:
        counts_embedding, counts_head: the embedding (the head) weighs as much as a layer, so its
            stage gets one layer less, none if need be.
        sizes: number of layers of every stage, in place of the even deal; the first and the last
            may have none, as they have the embedding and the head.

    Raises:
        ValueError: a number below 1, a stage that would hold nothing, or sizes that do not fit.
    """
    for name, value in {"num_layers": num_layers, "pp": pp, "chunks": chunks}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} >= 1, got {value!r}.")
    stages = pp * chunks
    if sizes is None:
        sizes = _even_sizes(num_layers, stages, int(counts_embedding), int(counts_head))
    elif len(sizes) != stages or sum(sizes) != num_layers:
        raise ValueError(
            f"Expected sizes of {stages} stages that sum to {num_layers} layers, got {sizes}."
        )
    elif min(sizes) < 0 or 0 in sizes[1:-1]:
        raise ValueError(f"Expected at least one layer in every inner stage, got sizes {sizes}.")
    ends = list(itertools.accumulate(sizes))
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(ranges[rank::pp]) for rank in range(pp))


def _even_sizes(num_layers: int, stages: int, embedding: int, head: int) -> list[int]:
    pieces = num_layers + embedding + head
    if pieces < stages:
        raise ValueError(
            f"Expected at least one layer (or counted embedding or head) for each of {stages} "
            f"stages, got {pieces}; lower pp or chunks."
        )
    base, left = divmod(pieces, stages)
    order = list(range(stages - 1, -1, -1))
    if not head:
        order = [*order[1:], order[0]]
    sizes = [base] * stages
    for stage in order[:left]:
        sizes[stage] += 1
    sizes[0] -= embedding
    sizes[-1] -= head
    return sizes
