"""Digests of each step of somebody else's program, written without waiting for the device.

    optimizer about to step   gradients
    optimizer has stepped     weights, its state, buffers, random states, the program's own groups
    step over                 rows of digests lie in pinned memory; written once the device is there

A step ends where the next one begins: at a backward pass after an optimizer has stepped, or as an
optimizer steps that has stepped already. What is digested is read when it is valid, at the hooks,
on the stream that is current there.
"""

import hashlib
import resource
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_core.graph.digest import NUM_COLUMNS, Digester, digest_hex
from harness.provenance import of_gpu
from harness.recorder.graphs import GraphInfo
from harness.recorder.session import Session
from harness.recorder.state import (
    Named,
    Names,
    cuda_is_used,
    gradient,
    optimizer_state,
    parameters,
    plain,
    random_states,
)

GROUPS = ("grads", "weights", "optim", "rng", "buffers", "frozen", "losses")
"""Groups that the recorder fills, or did once (`losses`); a script's own have other names."""
UNSCALED = "_harness_unscaled"
"""Attribute of a scaled loss: the loss."""
PAGE_BYTES = 4096
HEX_CHARS = 32
UNSEEDED = "0" * 32
"""In place of the digest of a random generator that no two runs could have alike."""


@dataclass
class Rows:
    """Digests of named tensors of one group: int32 [n, 5] on the host, perhaps still on its way."""

    names: Sequence[str]
    rows: Tensor
    section: str = ""


@dataclass
class Static:
    """Where the replays of a graph write a step's losses and norm."""

    capture: int
    losses: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None


@dataclass
class Step:
    """What has been observed of one step so far."""

    index: int
    is_explicit: bool = False
    groups: dict[str, list[Rows]] = field(default_factory=dict)
    host: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    told: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None
    taps: list[tuple[str, Tensor]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    places: dict[int, int] = field(default_factory=dict)
    skipped: str = ""
    mark: Any = None
    live_bytes: int = 0
    peak_bytes: int = 0

    @property
    def microbatches(self) -> list[Tensor]:
        """Losses that the script has told, or else those of backward passes."""
        return self.told or self.losses

    def place_of(self, optimizer: Any) -> int:
        """Its place among the optimizers of this step: one that is made anew has the old one's."""
        return self.places.setdefault(id(optimizer), len(self.places))

    def put(self, group: str, section: str, parts: Iterable[Rows]) -> None:
        """Add digests to a group; those of the same section replace what it had."""
        others = [each for each in self.groups.get(group, ()) if each.section != section]
        self.groups[group] = [*others, *parts]


@dataclass
class Stepping:
    """An optimizer that is in its step; `inner`: those that it holds and that have stepped."""

    optimizer: Any
    inner: list[Any] = field(default_factory=list)


class Observer:
    """Collects one rank's steps and writes their records."""

    def __init__(self, session: Session) -> None:
        self.session, self.names = session, Names()
        self.every = int(session.program.get("every", 1))
        self._optimizers: list[weakref.ref[Any]] = []
        self.own: dict[str, Callable[[], Named]] = {}
        self.current: Step | None = None
        self.pending = Step(-1)
        self.has_begun = self.has_trained = self.is_in_backward = self.is_paused = False
        self.num_taken = 0
        self._at_work: Step | None = None
        self._stepping: list[Stepping] = []
        self._holders: list[weakref.ref[Any]] = []
        self._only_lines = session.program.get("record") == "lines"
        self._step_in_backward: Step | None = None
        self.keep: Callable[[int, str, Sequence[Tensor]], None] | None = None
        self.written: Callable[[int], None] = lambda _: None
        self.add_taps: Callable[[Iterable[str]], None] = lambda _: None
        self._next = 0
        self._plans: dict[tuple[str, torch.device], tuple[list[str], Digester]] = {}
        self._queue: list[Step] = []
        self._written: dict[str, tuple[str, ...]] = {}
        self._written_taps: tuple[str, ...] = ()
        self._last_mark: Any = None
        self.seeded = {"cpu", "cuda"}
        if session.program.get("determinism") == "enforce":
            self.seeded |= {"python", "numpy"}
        self.capturing: Callable[[], GraphInfo | None] = lambda: None
        self._static: dict[int, Static] = {}

    # --- what happens in the program --------------------------------------------------------

    def made(self, optimizer: Any) -> None:
        """An optimizer was made: this is when its parameters are found under their names."""
        self.names.scan(parameters(optimizer))
        self.add(optimizer)

    def begin(self) -> None:
        """Record the state before the first step, once."""
        if self.has_begun:
            return
        self.has_begun = True
        if not self.names.is_settled:
            self.names.is_settled = True
            self.session.startup_s = time.monotonic() - self.session.started_s
            self.event("environment", _environment())
        first = Step(-1)
        self._observe_state(first, self.optimizers)
        self._mark(first)
        self._queue.append(first)

    def backward(self) -> None:
        """A backward pass is about to start; one after an optimizer's step begins the next step."""
        self.begin()
        self.has_trained = True
        self._close_if_stepped()
        self._stepping.clear()  # of a step that an error has ended
        self._step_in_backward = self._here()

    def loss(self, loss: Any, graph: GraphInfo | None = None, *, is_told: bool = False) -> None:
        """The root of a backward pass, which is a microbatch's loss if it is one number.

        Of one that a GradScaler has scaled it is the loss before: a scale may be too large.
        In the capture of a graph it is where each replay will write the loss. Of a step whose
        losses the script has told, those are recorded in place of the roots.
        """
        loss, step = _as_tensor(getattr(loss, UNSCALED, loss)), self._here()
        if loss.numel() != 1 or not loss.is_floating_point():
            return
        loss = loss.detach().reshape(())
        if graph is not None:
            self._static_of(graph).losses.append(loss)
        else:
            (step.told if is_told else step.losses).append(_to_host(loss))

    def norm(self, norm: Any, graph: GraphInfo | None = None) -> None:
        """The norm of the gradients; as `loss`."""
        norm = _as_tensor(norm).detach().reshape(-1)[:1].reshape(())
        if graph is None:
            self._here().norm = _to_host(norm)
        else:
            self._static_of(graph).norm = norm

    def _static_of(self, graph: GraphInfo) -> Static:
        held = self._static.get(graph.index)
        if held is None or held.capture != graph.captures:
            held = self._static[graph.index] = Static(graph.captures)
        return held

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors by name, for whoever has to say what lies at an address."""
        for optimizer in self.optimizers:
            self._know(optimizer)
            for param in parameters(optimizer):
                yield self.names.of(param), param
            yield from optimizer_state(optimizer, self.names, "")[0]
        yield from self.names.buffers()

    def before(self, optimizer: Any) -> None:
        """An optimizer is about to step.

        Before the first backward pass that makes state, of an optimizer or a checkpoint, and is no
        step of training: what it does to weights is in the state before step 0.
        """
        if not self.has_trained:
            return
        self._close_if_stepped(optimizer)
        step = self._at_work = self._open()
        step.place_of(optimizer)
        self._stepping.append(Stepping(optimizer))
        if not self._only_holds(optimizer):
            self._observe_gradients(step, [optimizer])

    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped; of several in one another the outermost ends the step.

        What it does after those that it holds, as a sharded one does, is in the weights.
        """
        if not self.has_trained:
            if self.has_begun:  # by a forward pass: what it saw was not the state before step 0
                self.has_begun = False
                self._queue.clear()
            return
        self.num_taken += 1
        self._at_work = None
        step = self._open()
        step.stepped.add(id(optimizer))
        inner = self._has_stepped(step, optimizer)
        if inner is not None and not step.is_explicit:
            self._observe_state(step, [*inner, optimizer])
            self._mark(step)
        # The state before step 0 is final now; by it the run's leader knows that steps are taken.
        self._drain(wait=False)

    def _has_stepped(self, step: Step, optimizer: Any) -> list[Any] | None:
        """Those that it holds and that have stepped in its step; None if another holds it."""
        places = [i for i, each in enumerate(self._stepping) if each.optimizer is optimizer]
        if not places:
            return []
        inner = self._stepping[places[0]].inner
        del self._stepping[places[0] :]
        held = {id(param) for each in inner for param in parameters(each)}
        is_holder = all(id(param) in held for param in parameters(optimizer))
        if self._only_holds(optimizer) and not is_holder:
            self._observe_gradients(step, [optimizer])
        if inner and is_holder and not self._only_holds(optimizer):
            self._holders.append(weakref.ref(optimizer))
        if self._stepping:
            self._stepping[-1].inner += [*inner, optimizer]
            return None
        return inner

    def _only_holds(self, optimizer: Any) -> bool:
        """Whether, when it stepped last, others did that have all its parameters."""
        return any(ref() is optimizer for ref in self._holders)

    def _close_if_stepped(self, optimizer: Any = None) -> None:
        """End a step without lines of the script, in which that optimizer, or any, has stepped."""
        step = self.current
        if step is None or step.is_explicit:
            return
        if step.stepped if optimizer is None else id(optimizer) in step.stepped:
            self.close()

    def replayed(self, graph: int) -> None:
        """A graph that holds an optimizer's step was replayed: that is a step of its own."""
        self.begin()
        self.has_trained = True
        self._close_if_stepped()
        step = self._open()
        step.stepped.add(-1)
        if (static := self._static.get(graph)) is not None:
            step.losses += map(_to_host, static.losses)
            step.norm = None if static.norm is None else _to_host(static.norm)
        self._observe_gradients(step, self.optimizers)
        if not step.is_explicit:
            self._observe_state(step, self.optimizers)
            self._mark(step)

    def skip(self, why: str) -> None:
        """The optimizer does not take this step."""
        step = self._open()
        step.skipped = why or "skipped"
        if not step.is_explicit:
            step.stepped.add(-1)
            self._observe_state(step, self.optimizers)
            self._mark(step)

    def enter(self) -> None:
        """The script says that a step begins."""
        self.begin()
        self.has_trained = True
        if self.current is not None:
            self.close()
        self._open().is_explicit = True

    def leave(self) -> None:
        """The script says that it is over."""
        step = self._open()
        if "grads" not in step.groups:
            self._observe_gradients(step, self.optimizers)
        stepping = [each for each in self.optimizers if id(each) in step.stepped]
        self._observe_state(step, stepping or self.optimizers)
        self._mark(step)
        self.close()

    def tap(self, name: str, row: Tensor, tensors: Sequence[Tensor]) -> None:
        """A row of a tap: digest of what went through a module, on its device."""
        step = self.step_of_calls()
        step.taps.append((name, _to_host(row)))
        if self.keep is not None:
            self.keep(self._next if step.index < 0 else step.index, name, tensors)

    @property
    def is_outside(self) -> bool:
        """Whether what happens now is no step, as only those in the script's lines are."""
        return self._only_lines and not (self.current is not None and self.current.is_explicit)

    def step_of_calls(self) -> Step:
        """The step that calls of modules belong to now."""
        if self.is_in_backward and self._step_in_backward is not None:
            return self._step_in_backward
        return self._here()

    def event(self, name: str, detail: Mapping[str, Any]) -> None:
        """Write a named fact, with the step that is under way or to come."""
        self.session.write("event", name=name, step=max(self.under_way(), 0), detail=dict(detail))

    def under_way(self) -> int:
        """The step that the program is in, -1 before its first forward pass of training.

        After a step's optimizers it is the next one, but for the last step that is due.
        """
        if not (self.has_begun or self.has_trained):
            return -1
        held = (self._at_work, self._step_in_backward if self.is_in_backward else None)
        if (
            inside := next((step.index for step in held if step and step.index >= 0), None)
        ) is not None:
            return inside
        if (step := self.current) is not None and (step.is_explicit or not step.stepped):
            return step.index
        due = self.session.config.get("steps")
        has_more = self.pending.losses or self.pending.told or self.pending.taps
        if isinstance(due, int) and 0 < due <= self._next and not has_more:
            return self._next - 1
        return self._next

    def finish(self) -> Mapping[str, Any]:
        """Write what is left; facts for the end record."""
        if self.current is not None:
            self.close()
        self._drain(wait=True)
        return {"peak_bytes": memory()[1], "replays": 0}

    # --- observing ---------------------------------------------------------------------------

    def _here(self) -> Step:
        """Where losses and taps go: to the open step, or to the one that is to come."""
        step = self.current
        return step if step is not None and (step.is_explicit or not step.stepped) else self.pending

    def _open(self) -> Step:
        if self.current is None:
            # What came before it, losses and taps, is of this step.
            self.current, self.pending = self.pending, Step(-1)
            self.current.index = self._next
            self._next += 1
        return self.current

    def _is_due(self, step: Step) -> bool:
        return step.index < 0 or step.index % self.every == 0

    def _observe_gradients(self, step: Step, optimizers: Sequence[Any]) -> None:
        if not self._is_due(step):
            return
        for optimizer, params in self._each_once(optimizers):
            named: Named = []
            for param in params:
                if (found := gradient(param)) is not None:
                    named += plain(self.names.of(param), found)
            section = f"grads{step.place_of(optimizer)}"
            step.put("grads", section, self._digest(step, "grads", section, named))

    def _each_once(self, optimizers: Sequence[Any]) -> Iterator[tuple[Any, list[Tensor]]]:
        """Optimizers with those of their parameters that none before them has."""
        seen: set[int] = set()
        for optimizer in optimizers:
            self._know(optimizer)
            yield optimizer, [param for param in parameters(optimizer) if id(param) not in seen]
            seen.update(map(id, parameters(optimizer)))

    def _observe_state(self, step: Step, optimizers: Sequence[Any]) -> None:
        step.live_bytes, step.peak_bytes = memory()
        if not self._is_due(step):
            return
        for optimizer, params in self._each_once(optimizers):
            number = step.place_of(optimizer)
            weights = [each for p in params for each in plain(self.names.of(p), p)]
            prefix = f"optimizer{number}." if number else ""
            tensors, numbers = optimizer_state(optimizer, self.names, prefix)
            at = f"weights{number}"
            step.put("weights", at, self._digest(step, "weights", at, weights))
            at = f"optim{number}"
            step.put("optim", at, self._digest(step, "optim", at, tensors))
            step.host.setdefault("optim", {})[at] = _hashed(numbers)
        # What only an optimizer has that does not step must be seen all the same.
        stepping = [each for each in self.optimizers if id(each) in step.places]
        trained = [p for each in stepping for p in parameters(each)]
        named = {"buffers": self.names.buffers(), "frozen": self.names.frozen(trained)}
        named |= {group: gather() for group, gather in self.own.items()}
        for group, tensors in named.items():
            step.put(group, group, self._digest(step, group, group, tensors))
        states = _hashed(random_states(self.seeded))
        rng = {name: each if name in self.seeded else UNSEEDED for name, each in states.items()}
        step.host["rng"] = {"rng": rng}

    def _know(self, optimizer: Any) -> None:
        self.add(optimizer)
        trained = parameters(optimizer)
        if not all(map(self.names.knows, trained)):
            self.names.scan(trained)

    @property
    def optimizers(self) -> list[Any]:
        """Those that have been seen and are still there: none is kept alive."""
        return [each for ref in self._optimizers if (each := ref()) is not None]

    def add(self, optimizer: Any) -> None:
        """Observe an optimizer's parameters from the first step on."""
        if not any(ref() is optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _digest(self, step: Step, group: str, section: str, named: Named) -> list[Rows]:
        """Digests of tensors, device by device, on the streams that are current."""
        by_device: dict[torch.device, Named] = {}
        for each in named:
            by_device.setdefault(each[1].device, []).append(each)
        if self.keep is not None:
            for name, *tensor in named:
                self.keep(step.index, f"{group}:{name}", tensor)
        return [self._rows(section, device, here) for device, here in by_device.items()]

    def _rows(self, section: str, device: torch.device, named: Named) -> Rows:
        names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
        out = torch.empty(len(named), NUM_COLUMNS, dtype=torch.int32, device=device)
        known = self._plans.get((section, device))
        try:
            if known is None or known[0] != names:
                raise ValueError
            known[1](tensors, out)
        except ValueError:
            digester = Digester(tensors, names)
            self._plans[section, device] = (names, digester)
            digester(tensors, out)
        return Rows(names, _to_host(out), section)

    def _mark(self, step: Step) -> None:
        """Where the step ends, for its time and for whoever waits until it is on the host."""
        if cuda_is_used():
            step.mark = torch.cuda.Event(enable_timing=True)
            step.mark.record()
        else:
            step.mark = time.perf_counter()

    # --- writing -----------------------------------------------------------------------------

    def close(self) -> None:
        """The open step is over."""
        step, self.current = self.current, None
        if step is None:
            return
        if step.mark is None:
            self._mark(step)
        self._queue.append(step)
        self._drain(wait=False)

    def _drain(self, *, wait: bool) -> None:
        while self._queue:
            step = self._queue[0]
            if isinstance(step.mark, torch.cuda.Event):
                if wait:
                    step.mark.synchronize()
                elif not step.mark.query():
                    return
            self._write(self._queue.pop(0))

    def _write(self, step: Step) -> None:
        names, digests, nonfinite = self._as_text(step)
        taps = tuple(name for name, _ in step.taps)
        changed = {g: list(n) for g, n in names.items() if self._written.get(g) != tuple(n)}
        if changed or taps != self._written_taps:
            self.session.write("names", step=step.index, tensors=changed, taps=list(taps))
            self._written |= {group: tuple(held) for group, held in changed.items()}
            self._written_taps = taps
        if step.index < 0:
            self.session.write("initial", digests=digests, nonfinite=nonfinite)
        else:
            self.session.write(
                "step", step=step.index, loss=_mean(step.microbatches),
                microbatch_losses=[_float_bits(loss) for loss in step.microbatches],
                grad_norm=None if step.norm is None else _float_bits(step.norm), digests=digests,
                nonfinite=nonfinite, step_s=self._seconds(step), live_bytes=step.live_bytes,
                peak_bytes=step.peak_bytes, skipped=step.skipped,
                taps="".join(_tap_text(rows, place) for place, (_, rows) in enumerate(step.taps)),
            )  # fmt: skip
            self.session.step = step.index
        self._last_mark = step.mark
        self.written(step.index)

    def _as_text(
        self, step: Step
    ) -> tuple[dict[str, list[str]], dict[str, str], dict[str, list[str]]]:
        """Per group: names, digests in hex, names of tensors that are not finite."""
        names: dict[str, list[str]] = {}
        digests: dict[str, str] = {}
        nonfinite: dict[str, list[str]] = {}
        for group, parts in step.groups.items():
            looked: list[tuple[str, tuple[str, int]]] = []
            for part in parts:
                text, flags = digest_hex(part.rows)
                rows = (text[i : i + HEX_CHARS] for i in range(0, len(text), HEX_CHARS))
                own = part.names if group == "optim" else _unique(part.names)
                looked += zip(own, zip(rows, flags, strict=True), strict=True)
            if group == "optim":  # each optimizer has a state of its own for a parameter they share
                each = _unique(name for name, _ in looked)
                looked = [(name, row) for name, (_, row) in zip(each, looked, strict=True)]
            # Optimizers may share a parameter, or one only hold another: the last look counts.
            found = dict(looked)
            names[group] = list(found)
            digests[group] = "".join(text for text, _ in found.values())
            if bad := [name for name, (_, flag) in found.items() if flag]:
                nonfinite[group] = bad
        for group, sections in step.host.items():
            hashed = [each for section in sections.values() for each in section.items()]
            known = names.setdefault(group, [])
            # As above: numbers of two optimizers for one parameter, or a number and a tensor.
            known += _unique((*known, *(name for name, _ in hashed)))[len(known) :]
            digests[group] = digests.get(group, "") + "".join(digest for _, digest in hashed)
        return names, digests, nonfinite

    def _seconds(self, step: Step) -> float:
        before, now = self._last_mark, step.mark
        if isinstance(now, torch.cuda.Event):
            return 1e-3 * before.elapsed_time(now) if isinstance(before, torch.cuda.Event) else 0.0
        return now - before if isinstance(before, float) else 0.0


def _unique(names: Iterable[str]) -> list[str]:
    """Names, those that come again with a number."""
    last: dict[str, int] = {}
    found: dict[str, None] = {}
    for name in names:
        number, shown = last.get(name, 1), name
        while shown in found:
            number += 1
            shown = f"{name}#{number}"
        last[name] = number
        found[shown] = None
    return list(found)


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; of a tensor on a device, one that is under way."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _environment() -> dict[str, Any]:
    """Facts of the device and torch's switches, known only once the program has begun."""
    found: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if cuda_is_used():
        found |= of_gpu(torch)
    return found


def memory() -> tuple[int, int]:
    """Bytes in use and the most so far: of torch on the GPU, else of the process."""
    if cuda_is_used():
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _hashed(values: Mapping[str, bytes]) -> dict[str, str]:
    """128 bits of BLAKE2b as hex: what lies on the host and is no tensor."""
    return {
        name: hashlib.blake2b(data, digest_size=16).hexdigest() for name, data in values.items()
    }


def _as_tensor(value: Any) -> Tensor:
    """A loss or a norm as the program gives it; a number is a float64, as Python's are."""
    value = getattr(value, "_local_tensor", value)
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _float_bits(value: Tensor) -> dict[str, Any]:
    """A float64 or a whole number by its 64 bits, what is narrower by those of a float32."""
    is_wide = value.dtype == torch.float64 or not value.is_floating_point()
    value = value.double() if is_wide else value.float()
    # By the integer view: a Python float may not keep the pattern of a NaN.
    pattern = int(value.view(torch.int64 if is_wide else torch.int32))
    bits = f"{pattern & (1 << 64) - 1:016x}" if is_wide else f"{pattern & (1 << 32) - 1:08x}"
    number = float(value)
    return {"bits": bits, "value": number if number - number == 0 else None}


def _mean(losses: Sequence[Tensor]) -> Mapping[str, Any] | None:
    """What curves show of a step: its only loss, or the mean of its microbatches on this rank."""
    if len(losses) < 2:
        return _float_bits(losses[0]) if losses else None
    mean = torch.stack([loss.double() for loss in losses]).mean()
    is_wide = any(loss.dtype == torch.float64 for loss in losses)
    return _float_bits(mean if is_wide else mean.float())


def _tap_text(rows: Tensor, place: int) -> str:
    return digest_hex(rows[None])[0] + f"{place:08x}"
