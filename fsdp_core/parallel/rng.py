"""Random streams: which ranks of a layout draw the same numbers, and which draw their own.

    streams = RandomStreams(seed, (axes.pp, axes.dp, axes.cp, axes.tp), device)
    own = streams.equal_over()          every rank draws its own: activations that are cut over tp
    shared = streams.equal_over("tp")   ranks that differ in tp alone draw the same: replicated ones

A stream is a generator seeded by what it is equal over and by this rank's coordinates on the other
axes. While it is active it takes the place of the device's default generator, of which kernels
draw:

    on CUDA    the default generator is pointed at the stream's state (`graphsafe_set_state`), and
               back. No sync, and a CUDA graph replays it, if the stream's `generator` was
               registered with it before its capture (`CUDAGraph.register_generator_state`).
    on the CPU the default generator and the tensor `state` exchange their contents, by an operator
               that the host graph records, undoes after the capture, and repeats at each replay.

Make every stream when the model is built. Activations that are computed again in the backward pass
must be given the numbers of the first time, by `checkpoint_contexts`.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F

from fsdp_core.parallel.mesh import Axis

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


class RandomStream:
    """One sequence of random numbers. `RandomStreams.equal_over` makes it.

    name: what it is equal over and this rank's coordinates on the other axes.
    generator: on CUDA what must be registered with graphs; None on the CPU.
    state: uint8, the state of the CPU's generator; None on CUDA.
    """

    def __init__(self, name: str, seed: int, device: torch.device, owner: "RandomStreams") -> None:
        self.name = name
        self._owner, self._device = owner, device
        made = torch.Generator(device).manual_seed(seed)
        self.generator = made if device.type == "cuda" else None
        self.state = None if self.generator is not None else made.get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Kernels inside that draw from the default generator draw from this stream. Not in a
        backward pass outside of `checkpoint_contexts`, and not within another stream.
        """
        self._owner.enter(self)
        try:
            with self._in_place_of_default():
                yield
        finally:
            self._owner.drawing = None

    @contextlib.contextmanager
    def _in_place_of_default(self) -> Iterator[None]:
        if self.state is not None:
            _exchange_state(self.state)
            try:
                yield
            finally:
                _exchange_state(self.state)
            return
        assert self.generator is not None
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        default = torch.cuda.default_generators[index]
        kept = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(kept)

    def dropout(self, x: torch.Tensor, p: float, *, training: bool) -> torch.Tensor:
        """`F.dropout` with numbers of this stream; draws nothing where it would change nothing."""
        return self._dropout(x, p) if training and p > 0.0 else x

    @torch.compiler.disable  # as `RandomStreams.enter`
    def _dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        with self.active():
            return F.dropout(x, p, training=True)

    def get_state(self) -> torch.Tensor:
        """A copy of the state, uint8 on the CPU, also on CUDA: no sync."""
        if self.generator is not None:
            return self.generator.get_state()
        assert self.state is not None
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        else:
            assert self.state is not None
            self.state.copy_(state)


class RandomStreams:
    """The random streams of one rank, of a run's seed; `axes` are all on which ranks may differ."""

    def __init__(self, seed: int, axes: Iterable[Axis], device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._axes = {axis.name: axis for axis in axes}
        self._streams: dict[str, RandomStream] = {}
        self.drawing: RandomStream | None = None
        self._recomputing = False

    def equal_over(self, *names: str) -> RandomStream:
        """The stream that ranks share which differ on the axes `names` alone: always one object.
        Streams equal over different axes are independent, also where the axes have one rank.
        """
        assert set(names) <= self._axes.keys(), f"{names} are not all of {[*self._axes]}"
        shared = "+".join(sorted(names)) or "nothing"
        places = [f"{a.name}={a.rank}" for a in self._axes.values() if a.name not in names]
        name = f"equal over {shared} at {' '.join(sorted(places)) or 'every rank'}"
        if name not in self._streams:
            self._streams[name] = RandomStream(name, seed_of(self._seed, name), self._device, self)
        return self._streams[name]

    @property
    def streams(self) -> tuple[RandomStream, ...]:
        return tuple(self._streams.values())

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """What must be registered with a CUDA graph before its capture; none on the CPU."""
        return tuple(s.generator for s in self._streams.values() if s.generator is not None)

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: stream.get_state() for name, stream in self._streams.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        assert states.keys() == self._streams.keys(), (sorted(self._streams), sorted(states))
        for name, state in states.items():
            self._streams[name].set_state(state)

    def checkpoint_contexts(self) -> Contexts:
        """`context_fn` for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`. The
        second run draws the numbers of the first, and leaves the streams as it found them.
        """
        states: dict[str, torch.Tensor] = {}
        return self._remember(states), self._repeat(states)

    @contextlib.contextmanager
    def _remember(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        self._refuse_capture()
        states.update(self.get_states())
        yield

    @contextlib.contextmanager
    def _repeat(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        self._refuse_capture()
        kept, nested = self.get_states(), self._recomputing
        self.set_states(states)
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = nested
            self.set_states(kept)

    def _refuse_capture(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "Expected checkpointing with random streams outside of CUDA graphs: a graph cannot "
                "draw the same numbers twice. Leave dropout or checkpointing out of the capture."
            )

    # The compiler would move the drawing past the change of state.
    @torch.compiler.disable
    def enter(self, stream: RandomStream) -> None:
        assert self.drawing is None, f"{stream.name} within {self.drawing}"
        if torch._C._current_graph_task_id() != -1 and not self._recomputing:
            # Recomputed activations would get another dropout mask than in the first forward pass.
            raise RuntimeError("Expected checkpoint(..., context_fn=streams.checkpoint_contexts).")
        self.drawing = stream


def seed_of(seed: int, name: str) -> int:
    """63 bits out of the run's seed and a name (BLAKE2b, RFC 7693)."""
    digest = hashlib.blake2b(f"{seed}: {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.library.custom_op("fsdp_core::exchange_random_state", mutates_args=("state",))
def _exchange_state(state: torch.Tensor) -> None:
    current = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    state.copy_(current)


@_exchange_state.register_fake
def _(state: torch.Tensor) -> None:
    del state
