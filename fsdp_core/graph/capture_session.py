"""One capture on all ranks, or on none: a handshake before and after, and a way back.

    with CaptureSession(device, "attn", generators=..., state=...) as session:
        session.at_end(hooks.restore)           however it ends
        session.on_abort(graphed.reset)         if any rank gave up
        for graphed in ...:
            with unit_gathered():               collectives: every rank, whatever happened before
                session.attempt(lambda: graphed.capture_forward(0))

`CaptureAborted`: every rank got to the end, and can go on eagerly. `CaptureLost`: a rank failed in
a function that communicates, left a note in the store, and ends; so must the others.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_core.device import Device, RngStates
from fsdp_core.graph.recorder import OverCompiled, collector_off
from fsdp_core.torch_versions import ALL_GATHER

_all_gather: Any = getattr(dist, ALL_GATHER)
_MESSAGE_BYTES = 512
_NAME_BYTES = 96
_NOTE_CHARS = 1000
_MOST_NAMED = 8
_POLL_S = 0.02
PATIENCE = timedelta(seconds=10)
"""How long a rank that failed waits for the others, unless told otherwise."""


class CaptureAborted(RuntimeError):
    """A capture was given up on every rank; nothing of it is left. `refusals`: why, by rank of the
    default process group.
    """

    def __init__(self, what: str, refusals: dict[int, str]) -> None:
        self.refusals = refusals
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(refusals.items()))
        super().__init__(f"the capture of {what} was given up on every rank: {reasons}")


class CaptureLost(RuntimeError):
    """A capture failed, and not all ranks can be met again: every process of the run has to end.
    `refusals`: as far as they are known; the first rank that failed is the first one here.
    """

    def __init__(self, what: str, refusals: dict[int, str], then: str) -> None:
        self.refusals = refusals
        reasons = "; ".join(f"rank {rank}: {why}" for rank, why in refusals.items())
        super().__init__(f"the capture of {what} failed: {reasons or 'on another rank'}; {then}")


class CaptureSession:
    """A capture that all ranks of the default process group make together.

    what: is captured; the same on every rank.
    generators, state: put back at the end, whatever was drawn and written: see `Undo`.
    refusal: why this rank cannot take part; then no rank does.
    communicates: the functions that are captured issue collectives; a failed `attempt` raises.
    patience: how long a rank that failed waits for the others to get to the end.
    """

    def __init__(
        self,
        device: Device,
        what: str,
        *,
        generators: Sequence[torch.Generator] = (),
        state: Sequence[torch.Tensor] = (),
        refusal: str | None = None,
        communicates: bool = False,
        patience: timedelta = PATIENCE,
    ) -> None:
        self._device, self._what, self._refusal = device, what, refusal
        self._communicates, self._patience = communicates, patience
        self._generators, self._state = tuple(generators), tuple(state)
        self._failure: Exception | None = None
        self._at_end: list[Callable[[], None]] = []
        self._on_abort: list[Callable[[], None]] = []
        self._collector_off = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Meet the other ranks; `CaptureAborted` if one refuses or captures something else."""
        # Graphs that are garbage already go now.
        gc.collect()
        refusal, cause = self._refusal, None
        if refusal is None:
            try:
                # Before the handshake: a rank that has no memory for it refuses with a word.
                undo = Undo(self._device, self._generators, self._state)
                self._at_end.insert(0, undo.put_back)
            except Exception as error:  # noqa: BLE001  (the others must hear of any)
                refusal, cause = _in_words(error), error
        refusals = exchange_refusals(self._device, self._what, refusal)
        if refusals:
            raise CaptureAborted(self._what, refusals) from cause
        self._notes = _Notes()
        self._collector_off.enter_context(collector_off())
        return self

    def at_end(self, function: Callable[[], None]) -> None:
        """Call it when the session ends, however it does; the last one first."""
        self._at_end.append(function)

    def on_abort(self, function: Callable[[], None]) -> None:
        """Call it if the capture is given up, here or on another rank; the last one first."""
        self._on_abort.append(function)

    def attempt(self, function: Callable[[], None]) -> None:
        """Call it unless something failed before; what it raises fails the session at its end, and
        is raised here, too, where functions communicate.
        """
        if self._failure is not None:
            return
        try:
            function()
        except Exception as error:
            self._fail(error)
            if self._communicates:
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Keep the captures if all ranks have them, else undo them and raise `CaptureAborted`, or
        `CaptureLost` if a rank does not get here.
        """
        with self._collector_off:
            ended = _call(self._at_end)
            # The first failure is the cause; what the body raised then may follow from it.
            failure = (error if isinstance(error, Exception) else None) or ended
            if self._failure is None and failure is not None:
                self._fail(failure)
            if error is not None and not isinstance(error, Exception):
                _call(self._on_abort)
                return  # interrupted: no time to talk
            self._settle()

    def _fail(self, error: Exception) -> None:
        """Remember this rank's first failure, for those, too, who may not meet it at the end."""
        self._failure = error
        self._notes.failed(_in_words(error))

    def _settle(self) -> None:
        failure, notes = self._failure, self._notes
        refusal = None if failure is None else _in_words(failure)
        try:
            notes.arrive()
            missing = () if failure is None else notes.missing(self._patience)
            if missing or notes.someone_left():
                notes.leave()
                raise self._lost(missing, "")
            refusals = exchange_refusals(self._device, self._what, refusal)
        except CaptureLost as lost:
            _call(self._on_abort)
            raise lost from failure
        except Exception as lost:  # noqa: BLE001  (the own failure matters more)
            _call(self._on_abort)
            raise self._lost((), str(lost)) from failure or lost
        if refusals:
            also = _call(self._on_abort)
            if also is not None:
                refusals[_rank()] = f"{refusals.get(_rank(), 'captured')}, and undoing: {also}"
            raise CaptureAborted(self._what, refusals) from failure

    def _lost(self, missing: Sequence[int], said: str) -> CaptureLost:
        refusals = self._notes.refusals()
        if not refusals and self._failure is not None:
            refusals = {_rank(): _in_words(self._failure)}
        then = f"rank {_rank()} got no word of the others: {said}"
        if missing:
            named = ", ".join(str(rank) for rank in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            then = f"without rank {named}{more} at its end, this process has to end"
        elif not said:
            then = "another rank has left"
        return CaptureLost(self._what, refusals, then)


def _call(functions: list[Callable[[], None]]) -> Exception | None:
    """Call all, last first, whatever any of them does; the first error."""
    first: Exception | None = None
    while functions:
        try:
            functions.pop()()
        except Exception as error:  # noqa: BLE001  (all have to run)
            first = first or error
    return first


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def exchange_refusals(device: Device, what: str, refusal: str | None) -> dict[int, str]:
    """Every rank's refusal by its rank in the default process group; empty if none refuses. A
    collective of 512 bytes a rank, which the host waits for. Ranks that name another `what` than
    rank 0 refuse. Long reasons are cut.
    """
    if not dist.is_initialized():
        return {} if refusal is None else {0: refusal}
    # A refusal without words is one still.
    text = b"" if refusal is None else (refusal or "no reason given").encode()
    message = what.encode()[:_NAME_BYTES] + b"\n" + text
    padded = bytearray(message[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device.torch_device)
    world = torch.empty(dist.get_world_size() * _MESSAGE_BYTES, dtype=torch.uint8).to(mine.device)
    _all_gather(world, mine)
    found, first = {}, ""
    for rank, row in enumerate(world.cpu().view(-1, _MESSAGE_BYTES)):
        got = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace")
        captured, _, reason = got.partition("\n")
        first = captured if rank == 0 else first
        if reason:
            found[rank] = reason
        elif captured != first:
            found[rank] = f"captures {captured}, where rank 0 captures {first}"
    return found


class _Notes:
    """What ranks leave in the store of one capture, where they cannot meet in a collective."""

    def __init__(self) -> None:
        alone = not dist.is_initialized()
        self._store: Any = dist.HashStore() if alone else distributed_c10d._get_default_store()
        self._rank, self._world_size = _rank(), 1 if alone else dist.get_world_size()
        number = self._store.add(f"captures of rank {self._rank}", 1)
        self._prefix = f"capture {number}: "

    def failed(self, refusal: str) -> None:
        with contextlib.suppress(RuntimeError):
            number = self._store.add(self._prefix + "failures", 1)
            note = f"{self._rank} {refusal[:_NOTE_CHARS]}"
            self._store.set(f"{self._prefix}failure {number}", note)

    def refusals(self) -> dict[int, str]:
        """Why ranks failed, the first one first; empty if the store is gone, too."""
        found: dict[int, str] = {}
        with contextlib.suppress(RuntimeError):
            for number in range(1, self._store.add(self._prefix + "failures", 0) + 1):
                key = f"{self._prefix}failure {number}"
                if self._store.check([key]):
                    rank, _, refusal = self._store.get(key).decode(errors="replace").partition(" ")
                    found.setdefault(int(rank), refusal)
        return found

    def arrive(self) -> None:
        """This rank is at the end of its capture, well or not."""
        self._store.set(f"{self._prefix}rank {self._rank}", "")
        self._store.add(self._prefix + "arrived", 1)

    def missing(self, patience: timedelta) -> tuple[int, ...]:
        """Ranks that are not at the end after `patience`, or once another rank has left."""
        until_s = time.monotonic() + patience.total_seconds()
        while self._store.add(self._prefix + "arrived", 0) < self._world_size:
            if time.monotonic() > until_s or self.someone_left():
                keys = {rank: f"{self._prefix}rank {rank}" for rank in range(self._world_size)}
                return tuple(rank for rank, key in keys.items() if not self._store.check([key]))
            time.sleep(_POLL_S)
        return ()

    def leave(self) -> None:
        """This rank waits for nobody any more."""
        self._store.set(self._prefix + "left", "")

    def someone_left(self) -> bool:
        """Whether a rank waits for nobody any more: no collective of all ranks will end."""
        return bool(self._store.check([self._prefix + "left"]))


class _Writes(OverCompiled):
    """Sees operators, unless paused."""

    is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operator, unless paused."""
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Undo:
    """What persistent tensors and generators held when it was made, or when they were written.
    `generators`: in addition to the device's default ones. `state`: tensors that kernels may write
    which no operator shows.
    """

    def __init__(
        self,
        device: Device,
        generators: Sequence[torch.Generator],
        state: Sequence[torch.Tensor] = (),
    ) -> None:
        self._device, self._rng_states = device, RngStates(device, generators)
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # One for all that is watched: what was made in a forward is no trace of its backward's.
        self._recorder = _Writes(
            keep_operations=False,
            before_write=lambda number, tensor: self._save(tensor),
            on_host=not device.is_cuda,
        )
        for tensor in state:
            self._save(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Save every tensor from before that an operator inside writes, before it does."""
        with self._device.watching_storages(self._recorder), self._recorder:
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Not watching inside: what gathers parameters writes where others will write next."""
        kept, self._recorder.is_paused = self._recorder.is_paused, True
        try:
            yield
        finally:
            self._recorder.is_paused = kept

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._saved and storage.nbytes():
            # All of the storage as bytes, without a version that autograd counts.
            empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
            live = empty.set_(storage, 0, (storage.nbytes(),), (1,))
            self._saved[storage._cdata] = (live, live.clone())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Give every saved tensor its old bytes, in place, and every generator its old state."""
        for live, saved in self._saved.values():
            # What was given back or grown meanwhile belongs to somebody else's bookkeeping.
            if live.untyped_storage().nbytes() == saved.numel():
                live.copy_(saved)
        self._rng_states.put_back()
