"""Digests of each step of somebody else's program, written without waiting for the device.

    optimizer about to step   gradients
    optimizer has stepped     weights, its state, buffers, random states, the program's own groups
    step over                 rows of digests lie in pinned memory; written once the device is there

A step ends where the next one begins: at a backward pass after an optimizer has stepped, or as an
optimizer steps that has stepped already. What is digested is read when it is valid, at the hooks,
on the stream that is current there.
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.graph.digest import NUM_COLUMNS, Digester, digest_hex
from harness.provenance import of_gpu
from harness.recorder import Recorder
from harness.recorder.graphs import GraphInfo
from harness.recorder.session import Session
from harness.recorder.state import (
    OTHERS,
    ByHand,
    Keeper,
    Named,
    Names,
    Rows,
    as_tensor,
    cuda_is_used,
    float_bits,
    found_in,
    gradient,
    has_gradient,
    is_there,
    kind_of,
    least_number,
    mean,
    memory,
    names_of_twins,
    next_number,
    optimizer_state,
    parameters,
    plain,
    random_states,
    row_of,
    seconds_between,
    sketch,
    to_host,
)

GROUPS = ("grads", "weights", "optim", "rng", "buffers", "frozen", OTHERS, "losses")
"""Groups that the recorder fills, or did once (`losses`); a script's own have other names."""
OVERFLOW = "GradScaler found a gradient that is not finite"
UNSCALED = "_harness_unscaled"
"""Attribute of a scaled loss: the loss."""
WAIT_S = 1e-3
FINAL = -2
"""In place of a step's number: the state after the last one."""


@dataclass
class Step:
    """What has been observed of one step so far; `told`: losses that the script gives.

    Of a graph, by the number of its capture: where its replays write losses and norm.
    """

    index: int
    is_explicit: bool = False
    groups: dict[str, dict[str, list[Rows]]] = field(default_factory=dict)  # by section
    losses: list[Tensor] = field(default_factory=list)
    told: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None
    sketches: dict[str, Tensor] = field(default_factory=dict)
    taps: list[tuple[str, Tensor]] = field(default_factory=list)
    # By tap, the last call of warm-up passes.
    warm_up: Mapping[str, int] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    places: dict[int, int] = field(default_factory=dict)
    skipped: str = ""
    overflows: list[Tensor] = field(default_factory=list)
    mark: Any = None
    memory: tuple[int, int] = (0, 0)

    @property
    def microbatches(self) -> list[Tensor]:
        return self.told or self.losses

    def own_taps(self) -> list[tuple[str, Tensor]]:
        """Its rows without those of warm-up passes, numbered anew."""
        if not self.warm_up:
            return self.taps
        own = list[tuple[str, Tensor]]()
        for name, row in self.taps:
            tap, _, text = name.removesuffix("]").rpartition("[")
            number = int(text) - self.warm_up.get(tap, -1) - 1
            own += [(f"{tap}[{number}]", row)] if number >= 0 else []
        return own

    def place_of(self, optimizer: Any) -> int:
        # One that is made anew has the place of the old one.
        return self.places.setdefault(id(optimizer), len(self.places))


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the recorder must not end somebody's program, nor be taken for the program's.

    Of an object with a `session` and `aside`, as an observer.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with self.aside():
                method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.session.broken(error)

    return call


class Observer(Recorder):
    """Collects one rank's steps and writes their records; what a script's own lines speak to."""

    def __init__(self, session: Session) -> None:
        self.session, self.names = session, Names(lambda: self.optimizers)
        self.every = int(session.program.get("every", 1))
        self.taps_every = self.every if session.is_job else 1
        self.own: dict[str, Callable[[], Named]] = {}
        self.current: Step | None = None
        self.pending = Step(-1)
        self.has_begun = self.has_trained = self.is_in_backward = self.is_in_trial = False
        self.has_gradients = False  # of `torch.autograd.grad`, which `torch.func` calls, too
        self.num_taken, self.most_passes = 0, 64
        self.aside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.add_taps: Callable[[Iterable[str]], None] = lambda _: None
        self.clipping: Callable[[], None] = lambda: None
        self.calls: Callable[[], Mapping[str, int]] = dict
        self.capturing: Callable[[], GraphInfo | None] = lambda: None
        self.backward_pass: Callable[[], contextlib.AbstractContextManager[Any]] = self.aside
        is_seeded = session.program.get("determinism") == "enforce"
        self.seeded = {"python", "numpy"} if is_seeded else set[str]()
        self._keeper = None if session.keep is None else Keeper(session, session.keep)
        self._only_lines = session.program.get("record") == "lines"
        self._optimizers: list[weakref.ref[Any]] = []
        self._by_hand: list[ByHand] = []
        # Optimizers that are stepping, one inside of another, and those inside that have stepped.
        self._stepping: list[Any] = []
        self._inner: list[Any] = []
        self._at_work: Step | None = None
        self._step_in_backward: Step | None = None
        self._next = self._first = int(session.program.get("first_step", 0))
        self._plans: dict[tuple[str, torch.device], tuple[list[str], Digester]] = {}
        self._static: dict[int, Step] = {}
        self._queue: list[Step] = []
        # Of each forward pass before the first backward pass: sequence number of the next autograd
        # node, the state before it, and the calls of modules until then.
        self._passes: list[tuple[int, Step, Mapping[str, int]]] = []
        self._written: dict[str, tuple[list[str], list[str]]] = {}  # names and shapes
        self._written_taps: list[str] = []
        self._last_mark: Any = None
        self._memory = (0, 0)
        self._seen: dict[str, dict[str, str]] = {}  # shapes of all tensors by group
        self._kept: list[Any] = []
        self._sketched: int | None = None

    # --- what happens in the program --------------------------------------------------------

    @guarded
    def made(self, optimizer: Any) -> None:
        """An optimizer was made: this is when its parameters are found under their names."""
        if self.has_begun and not self._optimizers and not self.has_stepped:
            self._forget()  # a backward pass warmed something up, as before a capture
        self.names.scan(parameters(optimizer))
        self.add(optimizer)

    @guarded
    def given(self, models: Sequence[nn.Module], optimizers: Iterable[Any]) -> None:
        params: list[Tensor] = [p for each in models for p in each.parameters()]
        self._by_hand = [ByHand(models)] if models else self._by_hand
        for each in optimizers:
            if hasattr(each, "param_groups"):  # else it is the program's own
                self.add(each)
                params += parameters(each)
        self.names.scan(params, roots=models)

    @guarded
    def begin(self) -> None:
        """Record the state before the first step, once."""
        if self.has_begun:
            return
        self.has_begun = True
        self.names.is_settled = True
        if not self.session.startup_s:
            self.session.startup_s = time.monotonic() - self.session.started_s
            # Facts of the device and torch's switches are known only now.
            is_deterministic = torch.are_deterministic_algorithms_enabled()
            gpu = of_gpu(torch) if cuda_is_used() else {}
            self.event("environment", {"deterministic": is_deterministic, **gpu})
        self._queue.append(self._before_training())

    def _before_training(self) -> Step:
        first = Step(-1)
        self._observe_state(first, self.optimizers)
        return first

    @guarded
    def forward(self, module: nn.Module) -> None:
        """A forward pass with gradients is about to start, which may be that of the first step.

        It is not if it is a warm-up, whose output no loss uses. So up to `most_passes` calls of
        root modules before the first backward pass record the state anew; `backward` chooses.
        """
        if not self.has_begun:
            self._passes = []
            self.begin()
            self._passes.append((next_number(), self._queue[0], {}))
        elif self._may_be_first(module):
            self._passes.append((next_number(), self._before_training(), dict(self.calls())))

    def _may_be_first(self, module: nn.Module) -> bool:
        is_room = len(self._passes) < self.most_passes
        return is_room and not self.has_trained and self.names.is_root(module)

    def _forget(self) -> None:
        """What was recorded as the state before the first step was not that."""
        self.has_begun = self.has_trained = self.names.is_settled = False
        self.pending = Step(-1)
        self._queue.clear()

    @guarded
    def backward(self, roots: Iterable[Any] = ()) -> None:
        """A backward pass is about to start; one after an optimizer's step begins the next step."""
        if not self.has_trained and len(self._passes) > 1:
            begun = least_number(roots)
            held = [each for each in self._passes if each[0] <= begun] or self._passes[:1]
            _, self._queue[0], self.pending.warm_up = held[-1]
        self._passes = []
        self._train()
        self._stepping, self._inner = [], []  # of a step that an error has ended
        self._step_in_backward = self._here()

    def _train(self) -> None:
        self.begin()
        self.has_trained = True
        self._close_if_stepped()

    @guarded
    def loss(self, loss: Any, graph: GraphInfo | None = None, *, is_told: bool = False) -> None:
        """The root of a backward pass, which is a microbatch's loss if it is one number.

        Of one that a GradScaler has scaled it is the loss before: a scale may be too large.
        In the capture of a graph it is where each replay will write the loss.
        """
        loss = as_tensor(getattr(loss, UNSCALED, loss))
        if loss.numel() == 1 and loss.is_floating_point():
            loss, step = loss.detach().reshape(()), self._here(graph)
            held = step.told if is_told else step.losses
            held.append(to_host(loss) if graph is None else loss)

    @guarded
    def grad_norm(self, norm: Any, graph: GraphInfo | None = None) -> None:
        norm = as_tensor(norm).detach().reshape(-1)[:1].reshape(())
        self._here(graph).norm = to_host(norm) if graph is None else norm

    @guarded
    def before(self, optimizer: Any) -> None:
        """An optimizer is about to step; before there are gradients that only makes state."""
        if not self.has_trained:
            if not (self.has_gradients and has_gradient(optimizer)):
                return
            self._train()
        self._close_if_stepped(optimizer)
        step = self._at_work = self._open()
        step.place_of(optimizer)
        self._stepping.append(optimizer)
        if isinstance(found := getattr(optimizer, "found_inf", None), Tensor):
            # A fused optimizer itself leaves its step out, and the host does not know yet.
            step.overflows.append(to_host(found))
        self._observe_gradients(step, [optimizer])

    @guarded
    def after(self, optimizer: Any) -> None:
        """An optimizer has stepped; of several in one another the outermost ends the step."""
        if not self.has_trained:
            if self.has_begun:  # by a forward pass
                self.has_begun = False
                self._queue.clear()
            return
        self.num_taken += 1
        self._at_work = None
        step = self._open()
        step.stepped.add(id(optimizer))
        place = next((i for i, it in enumerate(self._stepping) if it is optimizer), 0)
        del self._stepping[place:]
        self._inner.append(optimizer)
        if not self._stepping:
            over, self._inner = self._inner, []
            self._step_is_over(step, over)
        # The state before step 0 is final now; by it the run's leader knows that steps are taken.
        self._drain(wait=False)

    def _close_if_stepped(self, optimizer: Any = None) -> None:
        """End a step without lines of the script, in which that optimizer, or any, has stepped."""
        step = self.current
        if step is None or step.is_explicit:
            return
        if step.stepped if optimizer is None else id(optimizer) in step.stepped:
            self.close()

    @guarded
    def replayed(self, graph: int) -> None:
        """A graph that holds an optimizer's step was replayed: that is a step of its own."""
        self._train()
        step = self._open()
        step.stepped.add(-1)
        if (static := self._static.get(graph)) is not None:
            step.losses += map(to_host, static.losses)
            step.norm = None if static.norm is None else to_host(static.norm)
        self._observe_gradients(step, self.optimizers)
        self._step_is_over(step, self.optimizers)

    @guarded
    def skipped(self, why: str) -> None:
        step = self._open()
        step.skipped = why or "skipped"
        if self._sketched == step.index:
            self._sketched = None
        if not step.is_explicit:
            step.stepped.add(-1)
            self._step_is_over(step, self.optimizers)

    def _step_is_over(self, step: Step, optimizers: Sequence[Any]) -> None:
        if not step.is_explicit:
            self._observe_state(step, optimizers)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.enter()
        yield
        self._leave()

    def microbatch(self, loss: Any) -> None:
        self.loss(loss, is_told=True)

    def state(self, group: str, tensors: Mapping[str, Any]) -> None:
        if group in GROUPS:
            raise ValueError(f"Expected a group of the script's own, got {group!r}.")
        self.own[group] = lambda: [
            each for name, tensor in tensors.items() for each in plain(name, tensor)
        ]

    @guarded
    def enter(self) -> None:
        self.begin()
        self.has_trained = True
        self.close()
        self._open().is_explicit = True

    @guarded
    def _leave(self) -> None:
        step = self._open()
        if "grads" not in step.groups:
            self._observe_gradients(step, self.optimizers)
        stepping = [each for each in self.optimizers if id(each) in step.stepped]
        self._observe_state(step, stepping or self.optimizers)
        self.close()

    def left(self) -> None:
        """Record the state as the program leaves it: it may change after the last step.

        What is gone by then, or is no more what it was in that step, is left out.
        """
        self.close()
        if not self._written or not self.has_stepped:
            return
        final = Step(FINAL)
        with contextlib.suppress(Exception), self.aside():  # whatever is left of a device
            self._digest_state(final, self.optimizers)
            del final.groups["rng"]  # what comes after the training may draw
            self._mark(final)
            self._queue.append(final)

    def tap(self, name: str, row: Tensor, tensors: Sequence[Tensor]) -> None:
        self.step_of_calls().taps.append((name, to_host(row)))
        self.keep(name, tensors)

    def keep(self, name: str, values: Sequence[Any], step: int | None = None) -> None:
        """Copy tensors or numbers of a step, by default of its calls, if they are asked for."""
        if self._keeper is not None:
            self._keeper.take(self.number_of_calls if step is None else step, name, values)

    def add(self, optimizer: Any) -> None:
        if not any(each is optimizer for each in (*self._by_hand, *self.optimizers)):
            self._optimizers.append(weakref.ref(optimizer))

    def event(self, name: str, detail: Mapping[str, Any]) -> None:
        self.session.write("event", name=name, step=max(self.under_way(), 0), detail=dict(detail))

    # --- what there is ----------------------------------------------------------------------

    @property
    def has_stepped(self) -> bool:
        """Whether a step was opened; then the state before the first one stays as it is."""
        return self._next > self._first

    @property
    def is_outside(self) -> bool:
        is_inside = self.current is not None and self.current.is_explicit
        return self.is_in_trial or (self._only_lines and not is_inside)

    def step_of_calls(self) -> Step:
        inside = self._step_in_backward if self.is_in_backward else None
        return self._here() if inside is None else inside

    @property
    def number_of_calls(self) -> int:
        index = self.step_of_calls().index
        return self._next if index < 0 else index

    @property
    def taps_are_due(self) -> bool:
        return self._falls_due(self.number_of_calls, self.taps_every)

    def under_way(self) -> int:
        """The step that the program is in, -1 before training; after the optimizers the next one,
        but for the last step that is due."""
        if not (self.has_begun or self.has_trained):
            return -1
        for inside in (self._at_work, self._step_in_backward if self.is_in_backward else None):
            if inside is not None and inside.index >= 0:
                return inside.index
        if (step := self.current) is not None and (step.is_explicit or not step.stepped):
            return step.index
        due = self.session.config.get("steps")
        has_more = self.pending.microbatches or self.pending.taps
        is_last = isinstance(due, int) and 0 < due <= self._next and not has_more
        return self._next - is_last

    @property
    def optimizers(self) -> list[Any]:
        """Those that have been seen and are still there: none is kept alive."""
        return [it for ref in self._optimizers if (it := ref()) is not None] or [*self._by_hand]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors by name, for whoever has to say what lies at an address."""
        for optimizer, params in self._each_once(self.optimizers):
            yield from ((self.names.of(param), param) for param in params)
            yield from optimizer_state(optimizer, self.names, "")[0]
        yield from self.names.buffers()

    def _here(self, graph: GraphInfo | None = None) -> Step:
        """Where losses and taps go: to the open step, the one that is to come, or a graph's."""
        if graph is not None:
            if graph.index not in self._static or self._static[graph.index].index != graph.captures:
                self._static[graph.index] = Step(graph.captures)
            return self._static[graph.index]
        step = self.current
        return step if step is not None and (step.is_explicit or not step.stepped) else self.pending

    def _open(self) -> Step:
        if self.current is None:
            # What came before it, losses and taps, is of this step.
            self.current, self.pending = self.pending, Step(-1)
            self.current.index = self._next
            self._next += 1
        return self.current

    # --- observing ---------------------------------------------------------------------------

    def _is_due(self, step: Step) -> bool:
        return step.index < 0 or self._falls_due(step.index, self.every)

    @staticmethod
    def _falls_due(index: int, every: int) -> bool:
        return every > 0 and index % every == 0

    def _each_once(self, optimizers: Sequence[Any]) -> Iterator[tuple[Any, list[Tensor]]]:
        """Optimizers with those of their parameters that none before them has."""
        seen: set[int] = set()
        for optimizer in optimizers:
            self.add(optimizer)
            trained = parameters(optimizer)
            if not all(map(self.names.knows, trained)):
                self.names.scan(trained)
            yield optimizer, [param for param in trained if id(param) not in seen]
            seen.update(map(id, trained))

    def _observe_gradients(self, step: Step, optimizers: Sequence[Any]) -> None:
        if not self._is_due(step):
            return
        for optimizer, params in self._each_once(optimizers):
            named = [each for p in params for each in plain(self.names.of(p), gradient(p))]
            self._digest(step, "grads", f"grads{step.place_of(optimizer)}", named)
            if self._is_sketched(step, optimizer):
                scale = getattr(optimizer, "grad_scale", None)  # of fused ones
                step.sketches |= {name: to_host(sketch(held, scale)) for name, held in named}

    def _is_sketched(self, step: Step, optimizer: Any) -> bool:
        """`first` is the first step that is taken: until then weights are those of step 0."""
        asked = self.session.sketch
        if asked == "first" and self._sketched is None and not step.skipped:
            found = getattr(optimizer, "found_inf", None)
            self._sketched = None if isinstance(found, Tensor) and bool(found) else step.index
        return asked == "all" or (asked == "first" and step.index == self._sketched)

    def _observe_state(self, step: Step, optimizers: Sequence[Any]) -> None:
        is_due = self._is_due(step)
        if is_due or not self.session.is_job:  # asking costs as much as all else of such a step
            self._memory = memory()
        step.memory = self._memory
        if is_due:
            self._digest_state(step, optimizers)
        if step.index + 1 == self.session.config.get("steps") and _has_room():
            # Most programs are one function, whose variables are gone before the process ends.
            self._kept = [*self.optimizers, *self.names.roots, *self.names.other_modules]
        self._mark(step)

    def _digest_state(self, step: Step, optimizers: Sequence[Any]) -> None:
        for optimizer, params in self._each_once(optimizers):
            number = step.place_of(optimizer)
            weights = [each for p in params for each in plain(self.names.of(p), p)]
            prefix = f"optimizer{number}." if number else ""
            tensors, numbers = optimizer_state(optimizer, self.names, prefix)
            self._digest(step, "weights", f"weights{number}", weights)
            others = {name: repr(value).encode() for name, value in numbers.items()}
            self._digest(step, "optim", f"optim{number}", tensors, others)
            for name, value in numbers.items() if self._keeper is not None else ():
                self.keep(f"optim:{name}", [value], step.index)
        # What only an optimizer has that does not step must be seen all the same.
        stepping = [each for each in self.optimizers if id(each) in step.places]
        trained = [p for each in stepping for p in parameters(each)]
        named = {"buffers": self.names.buffers(), "frozen": self.names.frozen(trained)}
        # Looking costs more than digests do: at powers of two, the same steps in every run.
        number = (step.index - self._first) // max(self.every, 1) + 2
        if step.index < 0 or not number & (number - 1):
            self.names.find_others()
        named[OTHERS] = self.names.others()
        named |= {group: gather() for group, gather in self.own.items()}
        for group, tensors in named.items():
            self._digest(step, group, group, tensors)
        self._digest(step, "rng", "rng", [], random_states(self.seeded))

    def _digest(
        self, step: Step, group: str, section: str, named: Named,
        others: Mapping[str, bytes | None] | None = None,
    ) -> None:  # fmt: skip
        """Add digests of tensors, and of what is none, in place of what the section had."""
        by_device: dict[torch.device, Named] = {}
        for name, tensor in named:
            if step.index == FINAL and not is_there(tensor):
                continue
            by_device.setdefault(tensor.device, []).append((name, tensor))
            if self._keeper is not None:
                self.keep(f"{group}:{name}", [tensor], step.index)
        rows = [self._rows(section, device, here) for device, here in by_device.items()]
        if others:
            digests = torch.tensor([*map(row_of, others.values())], dtype=torch.int32)
            rows.append((list(others), digests, [""] * len(others)))
        sections = step.groups.setdefault(group, {})
        sections.pop(section, None)  # what was looked at last comes last
        sections[section] = rows

    def _rows(self, section: str, device: torch.device, named: Named) -> Rows:
        names, tensors = [name for name, _ in named], [tensor for _, tensor in named]
        shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors]
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
        return names, to_host(out), shapes

    def _mark(self, step: Step) -> None:
        if cuda_is_used():
            step.mark = torch.cuda.Event(enable_timing=True)
            step.mark.record()
        else:
            step.mark = time.perf_counter()

    # --- writing -----------------------------------------------------------------------------

    def close(self) -> None:
        step, self.current = self.current, None
        if step is None:
            return
        if step.mark is None:
            self._mark(step)
        self._queue.append(step)
        self._drain(wait=False)

    def finish(self) -> Mapping[str, Any]:
        self.close()
        self._kept = []
        self._drain(wait=True)
        return {"peak_bytes": memory()[1]}

    def _drain(self, *, wait: bool) -> None:
        while self._queue:
            mark = self._queue[0].mark
            if isinstance(mark, torch.cuda.Event):
                until_s = time.monotonic() + (self.session.patience_s if wait else 0.0)
                while not mark.query():
                    if time.monotonic() >= until_s:
                        return
                    time.sleep(WAIT_S)
            self._write(self._queue.pop(0))

    def _write(self, step: Step) -> None:
        names, digests, nonfinite = dict[str, Any](), dict[str, str](), dict[str, list[str]]()
        twins: dict[str, str] = {}
        for group, sections in step.groups.items():
            found = found_in(group, sections)
            if group == OTHERS:
                twins = names_of_twins(found)
                found = {new: found[old] for old, new in twins.items()}
            if step.index == FINAL:
                found = self._still_there(group, found)
            names[group] = list(found), [shape for *_, shape in found.values()]
            digests[group] = "".join(text for text, *_ in found.values())
            if bad := [name for name, (_, flag, _) in found.items() if flag]:
                nonfinite[group] = bad
        state = {"digests": digests, "nonfinite": nonfinite}
        if step.index == FINAL:
            tensors = {group: held for group, (held, _) in names.items()}
            self.session.write("final", step=self._next - 1, tensors=tensors, **state)
            return
        taps = step.own_taps()
        self._write_names(step, names, [name for name, _ in taps])
        if step.index < 0:
            self.session.write("initial", **state)
        else:
            skipped = step.skipped or (OVERFLOW if any(map(bool, step.overflows)) else "")
            rows = (f"{digest_hex(row[None])[0]}{i:08x}" for i, (_, row) in enumerate(taps))
            self.session.write(
                "step", step=step.index, loss=mean(step.microbatches),
                microbatch_losses=[float_bits(loss) for loss in step.microbatches],
                grad_norm=None if step.norm is None else float_bits(step.norm),
                step_s=seconds_between(self._last_mark, step.mark), live_bytes=step.memory[0],
                peak_bytes=step.memory[1], skipped=skipped, taps="".join(rows),
                sketches={name: row.tolist() for name, row in step.sketches.items()}, **state,
            )  # fmt: skip
            self.session.step = step.index
        self._last_mark = step.mark
        if self._keeper is not None:
            self._keeper.write(step.index, twins)

    def _still_there(self, group: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """What is of the name and shape that it had in a step; of twins, if there are as many."""
        seen = self._seen.get(group, {})
        odd = {kind_of(name.partition(".")[0]) for name in seen.keys() ^ found.keys()}
        return {
            name: row
            for name, row in found.items()
            if seen.get(name) == row[-1]
            if group != OTHERS or kind_of(name.partition(".")[0]) not in odd
        }

    def _write_names(
        self, step: Step, names: Mapping[str, tuple[list[str], list[str]]], taps: list[str]
    ) -> None:
        """Names and shapes by group, and names of taps, where the last ones do not hold any more"""
        if self.session.is_job and not taps:
            taps = self._written_taps  # a step that has none does not change those of the others
        changed = {group: each for group, each in names.items() if self._written.get(group) != each}
        if changed or taps != self._written_taps:
            about = {"tensors": {group: held for group, (held, _) in changed.items()}}
            if self.session.is_job:
                about["shapes"] = {group: shapes for group, (_, shapes) in changed.items()}
            self.session.write("names", step=step.index, taps=taps, **about)
            self._written |= changed
            for group, each in changed.items():
                self._seen.setdefault(group, {}).update(zip(*each, strict=True))
            self._written_taps = taps


def _has_room() -> bool:
    """Whether the device has memory for another program's state while this one's is kept."""
    return not cuda_is_used() or torch.cuda.mem_get_info()[0] > torch.cuda.memory_allocated()
