"""What a rank of the built-in trainer writes down: a record a step, events of its end.

After every step the trainer's static outputs are packed into one row of an int32 ring on the
device; every `flush_every` steps the ring is copied to the host once and written as step records,
so no step waits for the device. Floats travel as their bits.
"""

import contextlib
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_core import fsdp
from fsdp_core.device import Device
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.digest import NUM_COLUMNS, NUM_LANES, Digester, digest_hex, empty_rows
from fsdp_core.train import StepOutputs, Trainer
from fsdp_core.train.graphs import Graphs
from fsdp_core.train.taps import PLACE_COLUMN, Snapshot, matches
from harness.engine.evidence import IN_CAPTURE, Place, group_key
from harness.recorder import PlaceFile, RecordFile
from harness.recorder.operators import Operators
from harness.recorder.state import hashed, seconds_between, write_kept
from harness.records import (
    GIVEN,
    OPERATORS,
    UNFINISHED,
    EventRecord,
    FinalRecord,
    FloatBits,
    GivenCall,
    InitialRecord,
    RunSpec,
    StepRecord,
)

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DIGEST_TIMES = 5
SKIPPED = "the gradient norm was not finite"
MOST_MOVED = 8
"""Names of tensors that moved, in the event of a run's end."""


class StepClock:
    """Marks ends of steps, and says the seconds between them later, without waiting for any.

    On CUDA a mark is an event, read when the device has passed it; on the CPU, where work is done
    when it is issued, the host's clock. Times of a run add up to all of it.

    Args:
        stream: where steps are issued.
        most: steps between two calls of `drain`.
    """

    def __init__(self, device: Device, stream: Any, most: int) -> None:
        self._device, self._stream = device, stream
        self._events: list[Any] = []
        if device.is_cuda:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(most + 1)]
        self._marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if not self._device.is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = self._events.pop()
        event.record(self._stream)
        self._marks.append(event)

    def drain(self) -> list[float]:
        """Seconds of each step since the last call; the device has done their work."""
        seconds = list(itertools.starmap(seconds_between, itertools.pairwise(self._marks)))
        if self._device.is_cuda:
            self._events += self._marks[:-1]  # to be recorded again
        self._marks = self._marks[-1:]
        return seconds


class Observer:
    """Collects one rank's steps and writes their records."""

    def __init__(self, trainer: Trainer, rank: int, file: RecordFile) -> None:
        self._trainer, self._rank, self._file = trainer, rank, file
        self._groups = list(trainer.digested)
        width = self._pack(trainer.outputs).numel()
        rows = trainer.config.flush_every
        device = trainer.device.torch_device
        self._ring = torch.zeros(rows, width, dtype=torch.int32, device=device)
        # What the host knows of the steps in the ring: digests of random states, other fields.
        self._pending: list[tuple[str, dict[str, Any]]] = []
        self._pointers = trainer.pointer_changes() if trainer.config.ledger else None
        self.pointer_changes, self.moved = 0, dict[str, int]()
        self._clock = StepClock(trainer.device, trainer.stream, rows)

    @property
    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        names = {group: tuple(named) for group, (named, _) in self._trainer.digested.items()}
        return names | {"rng": tuple(self._trainer.rng_states())}

    def initial(self) -> InitialRecord:
        """The state before the first step; once, as it waits for the device."""
        digests, nonfinite = self._digests(self._trainer.digest_state(), self._rng())
        return InitialRecord(rank=self._rank, digests=digests, nonfinite=nonfinite)

    def final(self, step: int) -> FinalRecord:
        """The state as the run leaves it; nothing draws after the last step."""
        digests, nonfinite = self._digests(self._trainer.digest_state(), self._rng())
        tensors = {group: self.tensor_names[group] for group in digests}
        return FinalRecord(
            rank=self._rank, step=step, tensors=tensors, digests=digests, nonfinite=nonfinite
        )

    def observe(self, step: int) -> None:
        """Take the outputs of `step`; writes records when the ring is full."""
        trainer, device = self._trainer, self._trainer.device
        with device.on(trainer.stream):
            self._ring[len(self._pending)].copy_(self._pack(trainer.outputs))
        self._clock.tick()
        # What a stressor holds in its turn is no memory of the program's.
        live = device.live_bytes() - trainer.stress_bytes
        rng, moved = self._rng(), self._count_moved(step)
        facts = {
            "step": step, "pointer_changes": moved, "live_bytes": live,
            "peak_bytes": device.peak_bytes(), "host_bytes": host_bytes(),
        }  # fmt: skip
        self._pending.append((rng, facts))
        if len(self._pending) == len(self._ring):
            self.flush()

    def begin(self) -> None:
        """Forget the taps of the last step, once all have read them: `unfinished` is of this."""
        with self._trainer.device.on(self._trainer.stream):
            self._trainer.taps.begin()

    def unfinished(self, step: int) -> EventRecord | None:
        """What modules have handled in a step that failed; None where no tap looks."""
        rows = self._trainer.taps.rows
        if not rows.numel():
            return None
        with self._trainer.device.on(self._trainer.stream):
            text = self._taps_text(rows.flatten().cpu())
        return EventRecord(name=UNFINISHED, rank=self._rank, step=step, detail={"taps": text})

    def flush(self) -> None:
        """Copy the ring to the host and write the records of the steps in it."""
        if not self._pending:
            return
        with self._trainer.device.on(self._trainer.stream):
            rows = self._ring[: len(self._pending)].cpu()
        pending, self._pending = self._pending, []
        # Of all steps since the last flush: asked for at the end of the last one alone.
        pending[-1][1]["device_bytes"] = self._trainer.device.used_bytes()
        for row, (rng, facts), step_s in zip(rows, pending, self._clock.drain(), strict=True):
            self._file.write(self._record(row, rng, facts | {"step_s": step_s}))

    def graphs_event(self, step: int) -> EventRecord:
        trainer, counts = self._trainer, self._trainer.counts
        moved = itertools.islice(self.moved.items(), MOST_MOVED)
        detail = {
            "captured": counts.captured,
            "replays": counts.replays,
            "ledger_names": len(counts.external_names),
            "ledger_places": sorted(set(counts.external_places)),
            "ledger_unnamed": counts.unnamed_externals,
            "pointer_changes": self.pointer_changes,
            "compiled": [str(each) for each in trainer.compilations if not each.late],
            "compiled_late": [str(each) for each in trainer.compilations if each.late],
            "moved": [f"{name} (step {at})" for name, at in moved],
        }
        return EventRecord(name="graphs", rank=self._rank, step=step, detail=detail)

    def _rng(self) -> str:
        states = self._trainer.rng_states().values()
        return "".join(hashed(state.numpy().tobytes()) for state in states)

    def _digests(
        self, rows: dict[str, torch.Tensor], rng: str
    ) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        """Digests of the groups out of their rows on the host, and who of them is not finite."""
        digests, nonfinite = {"rng": rng}, {}
        for group, of_group in rows.items():
            digests[group], counts = digest_hex(of_group)
            names = self._trainer.digested[group][0]
            if bad := tuple(n for n, count in zip(names, counts, strict=True) if count):
                nonfinite[group] = bad
        return digests, nonfinite

    def _count_moved(self, step: int) -> int | None:
        if self._pointers is None:
            return None
        moved = self._pointers.count()
        self.pointer_changes += moved
        for name in self._pointers.moved:
            self.moved.setdefault(name, step)
        return moved

    def _pack(self, outputs: StepOutputs) -> torch.Tensor:
        scalars = torch.stack(
            (outputs.loss, outputs.grad_norm, outputs.evaluation, outputs.skipped)
        )
        floats = torch.cat((outputs.losses, scalars))
        digests = [outputs.digests[group].flatten() for group in self._groups]
        rows = self._trainer.taps.rows.flatten()
        return torch.cat((floats.view(torch.int32), *digests, rows))

    def _record(self, row: torch.Tensor, rng: str, facts: dict[str, Any]) -> StepRecord:
        config = self._trainer.config
        num_floats = config.microbatches + 4
        floats = row[:num_floats].tolist()
        *losses, loss, norm, evaluation, skipped = (
            FloatBits.from_bits(v & 0xFFFFFFFF) for v in floats
        )
        sizes = [len(self._trainer.digested[group][0]) * NUM_COLUMNS for group in self._groups]
        num_taps = len(row) - num_floats - sum(sizes)
        _, *parts, taps = row.split([num_floats, *sizes, num_taps])
        rows = [part.view(-1, NUM_COLUMNS) for part in parts]
        digests, nonfinite = self._digests(dict(zip(self._groups, rows, strict=True)), rng)
        return StepRecord(
            rank=self._rank, loss=loss, microbatch_losses=tuple(losses), grad_norm=norm,
            evaluation=evaluation if config.evaluates_after(facts["step"]) else None,
            digests=digests, nonfinite=nonfinite, taps=self._taps_text(taps),
            skipped=SKIPPED if skipped.value else "", **facts,
        )  # fmt: skip

    def _taps_text(self, row: torch.Tensor) -> str:
        """Rows of taps as hex: four lanes and the place in the step."""
        rows = row.view(self._trainer.taps.rows.shape)
        lanes = rows[:, [*range(NUM_LANES), PLACE_COLUMN]]
        return lanes.contiguous().numpy().astype(">i4").tobytes().hex()


def host_bytes() -> int:
    """Resident memory of this process that no file holds: mapped data grows as it is read."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE_BYTES


def at_rest(groups: Iterable[ParamGroup]) -> dict[str, int]:
    """Bytes that a rank keeps between steps, of its parameter groups.

    parameters     main weights, padding included, and copies in the dtype of compute
    gradients      kept in the dtype of the main weights
    optimizer      both moments, and two scalars
    largest_unit   full weights of the largest unit in the dtype of compute; 0 if none is gathered
    """
    parameters = gradients = moments = largest = 0
    for group in groups:
        nest, dtypes, total = group.nest, group.dtypes, group.layout.total_numel
        main = nest.numel(total, nest.main_level) * dtypes.main.itemsize
        parameters += main
        gradients += main
        if group.keeps_copy:
            parameters += nest.numel(total, nest.weight_level) * dtypes.compute.itemsize
        moments += sum(spec.local_numel for spec in group.specs)
        if nest.weight_level:
            largest = max(largest, total * dtypes.compute.itemsize)
    return {
        "parameters": parameters, "gradients": gradients, "largest_unit": largest,
        "optimizer": 2 * (moments + 1) * torch.float32.itemsize,
    }  # fmt: skip


def memory_event(trainer: Trainer, rank: int, step: int) -> EventRecord:
    """The event `memory`: nothing of it is compared, limits of `peak_memory` rest on it.

    at_rest               bytes kept between steps, by the layout; of our engine alone
    reserved_peak_bytes   what the caching allocator had from the driver at most (CUDA)
    """
    device, detail = trainer.device, dict[str, Any]()
    if trainer.config.engine == "ours":
        detail["at_rest"] = at_rest(trainer.groups)
    if device.is_cuda:
        detail["reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device.torch_device)
    return EventRecord(name="memory", rank=rank, step=step, detail=detail)


def digest_time_event(trainer: Trainer, rank: int, step: int) -> EventRecord:
    """The seconds of the digests that every step of a timed run takes, the fastest of some.

    The check `throughput` takes it off both times. Not on CUDA: launched from the host, as here,
    digests take longer than inside of a graph, and a graphed candidate had too much taken off.
    """
    device, found = trainer.device, list[float]()
    with device.on(trainer.stream):
        work = [
            (Digester(tensors, names), tensors, empty_rows(len(names), device.torch_device))
            for names, tensors in trainer.digested.values()
        ]
    for _ in range(DIGEST_TIMES):
        device.synchronize()
        began = time.perf_counter()
        with device.on(trainer.stream):
            for digester, tensors, out in work:
                digester(tensors, out)
        device.synchronize()
        found.append(time.perf_counter() - began)
    return EventRecord(name="digest_time", rank=rank, step=step, detail={"seconds": min(found)})


def keeper(
    spec: RunSpec, rank: int, folder: Path, trainer: Trainer, others: Sequence[Snapshot] = ()
) -> Callable[[int], None]:
    """What is to be called after each step, to write the tensors that a run keeps of one.

    `others` are copies that somebody else has taken in that step. Ours get their memory here,
    before anything is captured. `ValueError`: more than allowed.
    """
    keep = spec.keep
    if keep is None:
        return lambda step: None
    copies = trainer.keep(keep.names, keep.max_bytes)

    def observe(step: int) -> None:
        if step != keep.step:
            return
        with trainer.device.on(trainer.stream):
            kept = [*copies.read(trainer.outputs.digests), *others]
            for name, state in trainer.rng_states().items():
                if matches(keep.names, f"rng:{name}"):
                    # Records have a digest of the same bytes, from this very function.
                    kept.append(Snapshot(f"rng:{name}", 0, state, (), as_digested=True))
        write_kept(folder, spec.key, rank, step, kept)

    return observe


class Watched:
    """The operators of a module's calls that a run is asked to write down, if it is."""

    def __init__(self, spec: RunSpec, trainer: Trainer) -> None:
        self._operators: Operators | None = None
        self.kept: list[Snapshot] = []
        if spec.operators is None:
            return
        self._operators = Operators(spec.operators.to_json(), self._keep)
        named = (each for stage in trainer.stages for each in stage.named_modules())
        module = dict(named).get(spec.operators.module)
        if module is None:
            return  # of another stage of the pipeline
        original, self._is_due = module._call_impl, False
        watched = self._operators.around(module, original)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_again = torch._C._current_graph_task_id() != -1 or not module.training
            return (watched if self._is_due and not is_again else original)(*args, **kwargs)

        module._call_impl = call

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        copy = tensor.detach().to("cpu", copy=True)
        self.kept.append(Snapshot(name, 0, copy, (), as_digested=True))

    def of(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Inside, the step is taken."""
        operators = self._operators
        self._is_due = operators is not None and step == operators.step
        is_backward = operators is not None and self._is_due and operators.is_backward
        return operators if operators and is_backward else contextlib.nullcontext()

    def write(self, rank: int, file: RecordFile) -> None:
        if self._operators is not None:
            step, detail = self._operators.step, self._operators.detail()
            file.write(EventRecord(name=OPERATORS, rank=rank, step=step, detail=detail))


# --- notes of each collective that a rank enters, on the CPU --------------------------------------

# counter of live storage -> Notes.entering / waiting / left -> `PlaceFile`
#
# A replayed graph calls no code of the model, so whose a collective is can be asked only in eager
# steps. The order of the last step before graphs are captured is learned; in a replay a collective
# has the label of that place in the step, as long as the operators up to there are the same.
# Messages between two ranks are noted and not counted. Captures call collectives of their own,
# which are no part of that order. In the step that captures, the module that is running is noted,
# too, on a GPU as well: a rank that is killed there leaves no other word.
#
# In runs that tap, what the rank gives to each collective is digested on the host: a gradient's
# digest is that of the sum, so that a wrong sum is led back to its giver by what it gave alone.
_SHARDING = str(Path(fsdp.__file__).parent)
_WAIT = "_c10d_functional::wait_tensor"
_CAPTURES = (Graphs.capture_parts.__code__, Graphs.capture_iteration.__code__)
_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_INPUTS = frozenset({"input", "inputs", "input_tensor", "input_tensors", "tensors"})
"""What operators call the tensors that a rank brings along."""


@contextlib.contextmanager
def noted(
    device: Device, path: Path, step: Callable[[], int], eager_steps: int, *, gives: bool = False
) -> Iterator["Notes"]:
    """Inside, collectives are noted in the file at `path`, which is left behind by failures only.

    Where the device counts no memory, as on CUDA, none is noted. `step` gives the number of the
    step, `eager_steps` how many come before graphs are captured; `gives`: whether to note inputs.
    """
    file = PlaceFile(path)
    notes, counter = Notes(file, step, eager_steps), device.counter
    if counter is None or dist.get_world_size() == 1:
        yield notes
    else:
        counter.collectives = notes
        notes.given = [] if gives else None
        yield notes
        counter.collectives = None
    file.remove()


class Notes:
    """Keeps one rank's place; arguments as of `noted`.

    Attributes:
        given: what the rank gave in this step; None if nobody wants to know.
    """

    def __init__(self, file: PlaceFile, step: Callable[[], int], eager_steps: int) -> None:
        self._file, self._step, self._eager_steps = file, step, eager_steps
        self._entered: dict[str, int] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._labels: list[tuple[str, str]] = []
        self._is_known = True
        self._at = (-1, 0)
        self._last: tuple[str, str, tuple[int, ...]] = ("", "", ())
        self._module = ""
        self.given: list[GivenCall] | None = None

    def entering(self, func: Any, args: tuple[Any, ...]) -> None:
        operator: str = func._schema.name
        if operator != _WAIT:
            group = self._group(args)
            if counts := operator not in _POINT_TO_POINT:
                key = group_key(group)
                self._entered[key] = self._entered.get(key, 0) + 1
            self._last = (operator, self._label(operator), group)
            if self.given is not None and counts:
                self.given.append(_given(func, args, self._last[1], group))
        self._write(is_inside=True)

    def left(self) -> None:
        self._write(is_inside=False)

    def given_event(self, rank: int, step: int) -> EventRecord:
        detail = {"calls": [call.to_json() for call in self.given or ()]}
        return EventRecord(name=GIVEN, rank=rank, step=step, detail=detail)

    def begin(self) -> None:
        """A step begins: what the rank gave before is no part of it."""
        if self.given is not None:
            self.given = []

    @contextlib.contextmanager
    def modules(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, whichever module runs is noted, too; for the step that captures graphs."""
        named = [(name, each) for stage in stages for name, each in stage.named_modules() if name]
        before = [vars(each).get("_call_impl") for _, each in named]
        for name, each in named:
            # The instance's own, which `Module.__call__` finds first.
            each._call_impl = self._noting(name, each._call_impl)
        try:
            yield
        finally:
            for (_, each), own in zip(named, before, strict=True):
                del each._call_impl
                if own is not None:
                    each._call_impl = own

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            around, self._module = self._module, name
            self._write(is_inside=False)
            result = original(*args, **kwargs)
            self._module = around
            self._write(is_inside=False)
            return result

        return call

    def _write(self, *, is_inside: bool) -> None:
        operator, label, group = self._last
        self._file.write(
            Place(
                step=self._step(), operator=operator, label=label, group=group,
                is_inside=is_inside and operator not in _POINT_TO_POINT,
                entered=dict(self._entered), module=self._module,
                is_new=self._does_otherwise(),
            )
        )  # fmt: skip

    def _does_otherwise(self) -> bool:
        """Whether this collective is not that of earlier steps; until graphs are captured, whether
        a capture is early or missing."""
        step = self._step()
        if step > self._eager_steps:
            return not self._is_known
        return (self._last[1] == IN_CAPTURE) == (step < self._eager_steps)

    def _label(self, operator: str) -> str:
        label, in_capture = _unit_at_work()
        if in_capture:
            return label or IN_CAPTURE
        (before, number), step = self._at, self._step()
        number = number + 1 if step == before else 0
        self._at = (step, number)
        if step < self._eager_steps:
            self._labels = [*(self._labels if number else ()), (operator, label)]
            return label
        known, learned = self._labels[number] if number < len(self._labels) else ("", "")
        is_same = known == operator and label in ("", learned)
        self._is_known = is_same and (self._is_known or not number)
        return label or (learned if self._is_known else "")

    def _group(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Global ranks of the collective with these arguments."""
        for value in args[::-1]:
            if isinstance(value, str) and value in self._groups:
                return self._groups[value]
            if (group := _as_group(value)) is not None:
                name = group.group_name
                if name not in self._groups:
                    self._groups[name] = tuple(dist.get_process_group_ranks(group))
                return self._groups[name]
        return ()


def _as_group(value: Any) -> dist.ProcessGroup | None:
    try:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(cast("Any", value))
    except (LookupError, ValueError, RuntimeError):
        pass  # another class, how to reduce, or another string, the operation
    return None


def _given(func: Any, args: tuple[Any, ...], label: str, group: tuple[int, ...]) -> GivenCall:
    """What a rank brings to a collective that it enters, for the unit of that name."""
    digest = hashlib.blake2b(digest_size=8)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in _INPUTS:
            for tensor in tree_leaves(value):  # a scatter's are lists of lists
                # A copy: storage that numpy has seen can be resized no more, as pools do.
                own = tensor.detach().clone(memory_format=torch.contiguous_format)
                digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    operator = func._schema.name.rpartition("::")[2].strip("_")
    return GivenCall(operator=operator, label=label, group=group, digest=digest.hexdigest())


def _unit_at_work() -> tuple[str, bool]:
    """The FSDP unit or group whose code called this, "" if none did; whether in a capture."""
    label, in_capture = "", False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not label and _SHARDING in frame.f_code.co_filename:
            owners = (frame.f_locals.get(name) for name in ("self", "unit", "group"))
            found = (each for each in owners if isinstance(each, Unit | ParamGroup))
            label = next((each.name or "the root" for each in found), "")
        in_capture |= frame.f_code in _CAPTURES
        frame = frame.f_back
    return label, in_capture
