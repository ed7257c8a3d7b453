"""The order in which forwards and backwards of several microbatches are captured and run.

Modules are grouped in chunks. An order names chunks from 1: `2` is the next microbatch's forward
through chunk 2, its modules in order; `-2` the backward of the oldest open one, in reverse. Without
one, all modules run forward, then all backward, as one microbatch.

    [1, 2, -2, -1]          two chunks, one microbatch
    [1, 1, -1, 1, -1, -1]   one chunk, three microbatches, two of them open at a time

This is the meaning that TransformerEngine's `_order` has. Graphs share memory in the order of their
captures, so it must be the order in which a pipeline runs them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Order:
    """Chunks in the order of their forwards (positive) and backwards (negative).

    Attributes:
        chunks: numbers from 1.
        sizes: modules of each chunk; None: one chunk of all modules, or as many in each.
    """

    chunks: tuple[int, ...]
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Step:
    """A forward or backward of one module for the microbatch in a slot."""

    module: int
    slot: int
    is_forward: bool


@dataclass(frozen=True)
class CapturePlan:
    """An order with everything counted.

    Attributes:
        chunks: as in `Order`.
        sizes: modules of each chunk.
        num_slots: microbatches; each has a slot of its own.
        steps: module by module.
    """

    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    num_slots: int
    steps: tuple[Step, ...]


def plan_capture(num_modules: int, order: Order | None) -> CapturePlan:
    """What an order means for `num_modules` modules.

    Raises:
        ValueError: an order that does not run every chunk forward and backward equally often, or
            a chunk backward before it was forward, or chunks of other sizes than there are modules.
    """
    if num_modules < 1:
        raise ValueError(f"Expected at least one module to capture, got {num_modules}.")
    chunks = (1, -1) if order is None else order.chunks
    num_chunks = max(chunks, default=0)
    sizes = _sizes(num_modules, num_chunks, None if order is None else order.sizes)
    num_slots = _num_microbatches(chunks, num_chunks)
    starts = [sum(sizes[:chunk]) for chunk in range(num_chunks)]
    forwards, backwards = [0] * num_chunks, [0] * num_chunks
    steps: list[Step] = []
    for number in chunks:
        chunk, is_forward = abs(number) - 1, number > 0
        done = forwards if is_forward else backwards
        members = range(starts[chunk], starts[chunk] + sizes[chunk])
        for module in members if is_forward else reversed(members):
            steps.append(Step(module, done[chunk], is_forward))
        done[chunk] += 1
        if backwards[chunk] > forwards[chunk]:
            raise ValueError(
                f"Expected chunk {chunk + 1} forward before it is backward, got {list(chunks)}."
            )
    return CapturePlan(chunks, sizes, num_slots, tuple(steps))


def _sizes(num_modules: int, num_chunks: int, sizes: tuple[int, ...] | None) -> tuple[int, ...]:
    if num_chunks < 1:
        raise ValueError("Expected an order that names at least one chunk, got none.")
    if sizes is None:
        if num_modules % num_chunks:
            raise ValueError(
                f"Expected sizes of {num_chunks} chunks, as they do not divide {num_modules} "
                "modules, got none."
            )
        return (num_modules // num_chunks,) * num_chunks
    if len(sizes) != num_chunks or min(sizes) < 1 or sum(sizes) != num_modules:
        raise ValueError(
            f"Expected sizes of {num_chunks} chunks that add up to {num_modules} modules, got "
            f"{list(sizes)}."
        )
    return sizes


def _num_microbatches(chunks: tuple[int, ...], num_chunks: int) -> int:
    named = [sign * chunk for chunk in range(1, num_chunks + 1) for sign in (1, -1)]
    counts = {number: chunks.count(number) for number in named}
    if len(set(counts.values())) != 1 or sum(counts.values()) != len(chunks):
        raise ValueError(
            f"Expected every chunk of 1 to {num_chunks} forward and backward equally often, got "
            f"{list(chunks)}."
        )
    return counts[1]
