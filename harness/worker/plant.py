"""Planted faults of a rank: a few injectors, parametrised by harness/faults/catalogue.txt.

The last column of an entry is what a rank does for it: injections, separated by `;`. Each is

    [moment:] injector [words]

    early    before there is a trainer       each     before the plant's step and every later one
    (none)   before the plant's step         after    after that step's optimizer
    capture  before the step that captures   end      once all records are written

A word that is a path begins with what is found in the trainer (`ROOTS`, `unit[NAME]`,
`module[NAME]`) or with a Python module and a colon, and goes on with attributes and indices; lists
on the way stand for each of their elements. A word that is a value is JSON, or a path after `@`.

A rank is a process of its own that ends with its run, so what a fault patches stays patched. It
touches attributes and methods of the trainer's parts, of torch, of the operating system; nothing
in `fsdp_core` knows of faults.
"""

import contextlib
import copy
import dataclasses
import importlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Schedule, Unit, in_backward
from fsdp_core.graph.device_graphs import CudaGraph, HostGraph
from fsdp_core.train import Trainer
from fsdp_core.train.build import roots
from harness.engine.machine import describe_machine
from harness.faults.catalogue import CATALOGUE
from harness.provenance import own_gpu
from harness.recorder import RecordFile
from harness.records import EventRecord, PlantSpec, RunSpec, dumps, each_of
from harness.repeats import is_timed

Act = Callable[[Any], Any]
"""Of the trainer, or early of the configuration, which it may give anew."""


def injections(spec: PlantSpec) -> dict[str, list[Act]]:
    """What a plant does to a trainer, by moment; "" is before its step."""
    found: dict[str, list[Act]] = {}
    for moment, name, words in parsed(spec.fault):
        if name != "record":
            given = [(spec.tensor or "-") if word == "$tensor" else word for word in words]
            found.setdefault(moment, []).append(partial(_injected, _known(name), given))
    return found


def _injected(act: Callable[..., Any], words: list[str], trainer: Any) -> Any:
    return act(trainer, *words)


def _known(name: str) -> Callable[..., Any]:
    """What the catalogue calls by a name: a private function here or in `harness.worker.plants`.

    Injectors are `function(trainer, *words)`; what `around` and `before` put in the place of a call
    is `function(site, ...)` with the call's arguments.
    """
    plants = vars(importlib.import_module("harness.worker.plants"))
    found: Callable[..., Any] = plants["LINES"].get(name) or {**plants, **globals()}[f"_{name}"]
    return found


def parsed(fault: str) -> Iterator[tuple[str, str, list[str]]]:
    """Moment, injector and words of each injection of a fault."""
    for part in CATALOGUE[fault].plant.split(";"):
        name, *words = part.split()
        moment = name.removesuffix(":")
        yield (moment, words[0], words[1:]) if moment != name else ("", name, words)


# ---- where


class NotHere(LookupError):
    """A rank has no part of the model of that name: it is of another stage."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this rank holds no {name}: plant the fault on one that does")


def schedules(trainer: Trainer) -> list[Schedule]:
    """Of every stage of the rank."""
    return [root.fsdp_schedule for root in roots(trainer.stages)]


def layers(trainer: Trainer) -> list[Any]:
    """Those of the rank, in their order."""
    return [layer for stage in trainer.stages for layer in stage.numbered_layers.values()]


def first_unit(trainer: Trainer) -> Unit:
    """That of the rank's first layer."""
    return units_in(layers(trainer)[0])[0]


ROOTS: Mapping[str, Callable[[Any], Any]] = {
    "trainer": lambda trainer: trainer,
    "stages": lambda trainer: list(trainer.stages),
    "schedules": schedules,
    "layers": layers,
    "first": first_unit,
    "graphs": lambda trainer: [HostGraph, CudaGraph],
}


def unit_named(trainer: Trainer, name: str) -> Unit:
    """The FSDP unit of that name.

    Raises:
        NotHere: this rank has none.
    """
    units = {unit.name: unit for schedule in schedules(trainer) for unit in schedule.units}
    if name not in units:
        raise NotHere(name)
    return units[name]


def module_named(trainer: Trainer, name: str) -> Any:
    """The module of that name in the whole model; raises as `unit_named`."""
    for stage in trainer.stages:
        held = dict(cast("nn.Module", stage).named_modules())
        if name in held:
            return held[name]
    raise NotHere(name)


def group_of_layer_1(trainer: Trainer) -> ParamGroup:
    """The parameters of the second layer's unit."""
    return unit_named(trainer, "layers.1").groups[0]


def values_at(trainer: Any, path: str) -> list[Any]:
    """All that a path leads to.

    Raises:
        NotHere: there is nothing.
    """
    value: Any
    module, colon, rest = path.partition(":")
    root, bracket, named = path.partition("[")
    if colon:
        value, parts = importlib.import_module(module), rest.split(".")
    elif bracket:
        name, _, rest = named.partition("]")
        value = (unit_named if root == "unit" else module_named)(trainer, name)
        parts = rest.split(".")[1:]
    else:
        root, *parts = path.split(".")
        value = ROOTS[root](trainer)
    held = [value]
    try:
        for part in parts:
            if part.lstrip("-").isdigit():
                held = [each[int(part)] for each in held]
            else:
                held = [getattr(each, part) for each in flat(held)]
    except AttributeError:
        raise NotHere(path) from None
    return held


def places_at(trainer: Any, path: str) -> list[tuple[Any, str]]:
    """Owners of the attribute that a path ends with, and its name."""
    module, _, attribute = path.partition(":")
    head, _, name = path.rpartition(".")
    in_module = attribute and "." not in attribute
    found = [importlib.import_module(module)] if in_module else flat(values_at(trainer, head))
    places = [(owner, attribute if in_module else name) for owner in found]
    if not all(hasattr(*place) for place in places):
        raise NotHere(path)
    return places


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The elements of lists among the values in their place."""
    for value in values:
        yield from value if isinstance(value, list | tuple) else [value]


def value_of(trainer: Any, word: str) -> Any:
    """What a word of the catalogue says."""
    return values_at(trainer, word[1:])[0] if word.startswith("@") else json.loads(word)


def assign(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, of a frozen object too."""
    try:
        setattr(owner, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(owner, name, value)


@contextlib.contextmanager
def on_its_stream(trainer: Trainer) -> Iterator[None]:
    """Inside, work is the trainer's own, without gradients; it is finished afterwards."""
    with torch.no_grad(), trainer.device.on(trainer.stream):
        yield
        trainer.device.synchronize()


def keep(trainer: Trainer, tensor: torch.Tensor) -> None:
    """Hold a tensor for as long as there is the trainer."""
    vars(trainer).setdefault("_held_by_faults", []).append(tensor)


@dataclass
class Site:
    """Where a function is in the place of a call, which was `call`; `number` counts from 1.

    `trainer` is early the configuration; `kept` is whatever the function remembers.
    """

    trainer: Any
    owner: Any
    call: Callable[..., Any]
    function: Callable[..., Any]
    number: int = 0
    kept: Any = None

    @property
    def called(self) -> Callable[..., Any]:
        def called(*args: Any, **how: Any) -> Any:
            self.number += 1
            return self.function(self, *args, **how)

        return called


def surround(trainer: Any, where: str | tuple[Any, str], function: Callable[..., Any]) -> None:
    """Put `function` in the place of calls of an attribute, given by path or owner."""
    for owner, name in places_at(trainer, where) if isinstance(where, str) else [where]:
        assign(owner, name, Site(trainer, owner, getattr(owner, name), function).called)


def _call(trainer: Any, path: str, *words: str) -> None:
    """Call it now, wherever it is."""
    for function in values_at(trainer, path):
        function(*(value_of(trainer, word) for word in words))


def _around(trainer: Any, path: str, name: str, *words: str) -> None:
    """A function in the place of a call, with values after the call's own arguments."""
    more = [value_of(trainer, word) for word in words]
    function = _known(name)
    surround(trainer, path, lambda site, *args, **how: function(site, *args, *more, **how))


def _before(trainer: Any, path: str, name: str) -> None:
    """A function, and then the call."""
    function = _known(name)

    def acting(site: Site, *args: Any, **how: Any) -> Any:
        function(site, *args)
        return site.call(*args, **how)

    surround(trainer, path, acting)


def _then(trainer: Any, path: str, name: str, *words: str) -> None:
    """After each call another injection."""
    injector = _known(name)

    def acting(site: Site, *args: Any, **how: Any) -> Any:
        result = site.call(*args, **how)
        injector(trainer, *words)
        return result

    surround(trainer, path, acting)


def _skip(trainer: Any, path: str, when: str = "", value: str = "null") -> None:
    """Calls do nothing, all, the `first` or those `in_backward`; `->` says what they give."""

    def skipped(site: Site, *args: Any, **how: Any) -> Any:
        if {"first": site.number > 1, "in_backward": not in_backward()}.get(when):
            return site.call(*args, **how)
        return args[int(value[1:])] if value.startswith("$") else value_of(trainer, value)

    surround(trainer, path, skipped)


def _twice(site: Site, *args: Any) -> Any:
    """Each call is made twice; the first one's result counts."""
    result = site.call(*args)
    site.call(*args)
    return result


def _argument(trainer: Any, path: str, key: str, *change: str) -> None:
    """An argument of calls, by its place or its name, is changed as by `set`."""

    def changed(site: Site, *args: Any, **how: Any) -> Any:
        given: Any = list(args) if key.isdigit() else how
        at: Any = int(key) if key.isdigit() else key
        given[at] = _changed(trainer, given[at], *change)
        return site.call(*(given if key.isdigit() else args), **how)

    surround(trainer, path, changed)


def _result(trainer: Any, path: str, fields: str, *change: str) -> None:
    """What calls give is changed as by `set`, in a field of it such as `groups.0`."""

    def changed(site: Site, *args: Any, **how: Any) -> Any:
        return _with(trainer, site.call(*args, **how), fields.split("."), change)

    surround(trainer, path, changed)


def _with(trainer: Any, held: Any, fields: list[str], change: tuple[str, ...]) -> Any:
    """A copy of frozen values in which one is changed."""
    if not fields:
        return _changed(trainer, held, *change)
    first, *rest = fields
    if first.isdigit():
        values = list(held)
        values[int(first)] = _with(trainer, values[int(first)], rest, change)
        return tuple(values)
    value = _with(trainer, getattr(held, first), rest, change)
    put = held._replace if hasattr(held, "_replace") else partial(dataclasses.replace, held)
    return put(**{first: value})


# ---- attributes and tensors


def _cloned(held: Any) -> Any:
    if isinstance(held, list):
        held[:] = map(_cloned, held)
        return held
    return held.clone() if isinstance(held, torch.Tensor) else copy.copy(held)


_VALUES: Mapping[str, Callable[..., Any]] = {
    "cloned": _cloned,
    "replaced": lambda was, field, value: dataclasses.replace(was, **{field: value}),
    "to": lambda was, value: value,
    "list_of": lambda was, value: [value],
    "plus": lambda was, value: was + value,
    "times": lambda was, value: was * value,
    "power": lambda was, value: was**value,
    "with": lambda was, value: was | value,
    "not": lambda was: int(not was),
    "halves_swapped": lambda was: torch.cat(was.chunk(2)[::-1]),
    "first_swapped": lambda was: torch.cat((was[:2].flip(0), was[2:])),
    "zero_at": lambda was, index: was.index_fill(0, torch.tensor([index], device=was.device), 0),
}


def _noise(row: torch.Tensor) -> None:
    """Low bits by what the operating system has gathered: no two runs are alike."""
    bits = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
    row[:8].view(torch.int32).bitwise_xor_(bits.to(row.device, torch.int32))


TENSORS: Mapping[str, Callable[..., Any]] = {
    "add": torch.Tensor.add_,
    "times": torch.Tensor.mul_,
    "fill": torch.Tensor.fill_,
    "copy": torch.Tensor.copy_,
    "negate": torch.Tensor.neg_,
    "ulp": lambda tensor: tensor.view(torch.int32).add_(1),
    "flip": lambda tensor: tensor.copy_(tensor.flip(0)),
    "shift": lambda tensor: tensor.copy_(tensor.roll(-1, 0)),
    "swap": lambda rows: rows[:2].copy_(rows[:2].flip(0)),
    "round": lambda tensor: tensor.copy_(tensor.bfloat16()),
    "noise": _noise,
}


def _changed(trainer: Any, was: Any, how: str, *words: str) -> Any:
    return _VALUES[how](was, *(value_of(trainer, word) for word in words))


def _set(trainer: Trainer, path: str, *change: str) -> None:
    """An attribute has another value."""
    with on_its_stream(trainer):
        for owner, name in places_at(trainer, path):
            assign(owner, name, _changed(trainer, getattr(owner, name), *change))


def _change(trainer: Any, path: str, how: str, *words: str) -> None:
    """A tensor, or each of a list, is changed in place."""
    with torch.no_grad():
        for tensor in flat(values_at(trainer, path)):
            TENSORS[how](tensor, *(value_of(trainer, word) for word in words))


def _element(trainer: Trainer, tensor: str, how: str, *words: str) -> str:
    """The first element of a main weight, the first one's where none is named."""
    names, tensors = trainer.digested["weights"]
    name = names[0] if tensor == "-" else tensor
    if name not in names:
        raise ValueError(
            f"plant.tensor: expected a parameter with rows on rank {dist.get_rank()}, got "
            f"{name!r}; legal values: {', '.join(names)}"
        )
    values = [float(word) for word in words]
    TENSORS[how](tensors[names.index(name)].view(-1)[:1], *values)
    return name


def _gradient(trainer: Trainer, how: str, row: str = "") -> None:
    """The last matrix that this rank has two rows of, as each backward pass gives its gradient."""
    group, index = [
        (group, index)
        for group in trainer.groups
        for index, spec in enumerate(group.specs)
        if len(spec.local_shape) > 1 and spec.local_shape[0] > 1
    ][-1]

    def changed(site: Site, stream: Any, *, final: bool) -> Any:
        with torch.no_grad():
            rows = group.layout.views(group.gradients.pooled)[index]
            TENSORS[how](rows[int(row)] if row else rows)
        return site.call(stream, final=final)

    surround(trainer, (group.gradients, "reduce"), changed)


def _add_overflow(site: Site, trainer: Trainer) -> None:
    """A tensor is added to the last gradient, by graphs too: 0 until `overflow_once`."""
    site.call(trainer)
    grad = trainer.optimizer.grads[-1]
    if "_overflow" not in vars(trainer):
        vars(trainer)["_overflow"] = torch.zeros_like(grad)
    grad.add_(vars(trainer)["_overflow"])


def _overflow_once(trainer: Trainer) -> None:
    """The next step overflows, none after it."""
    overflow = vars(trainer)["_overflow"]
    is_over = vars(trainer).setdefault("_overflowed", False)
    vars(trainer)["_overflowed"] = True
    with on_its_stream(trainer):
        overflow.fill_(0.0 if is_over else torch.inf)


def _skip_once(site: Site, skipped: torch.Tensor) -> None:
    """The first update is left out, as where the norm is not finite."""
    if site.number == 1:
        skipped.fill_(1.0)
    site.call(skipped)


def _config(config: TrainConfig, key: str, word: str) -> TrainConfig:
    """The configuration with another value, whatever its rules say to it."""
    outer, _, last = key.rpartition(".")
    known: dict[str, Callable[[], object]] = {
        "but_the_last": lambda: (0, config.model.layers - 2),
        "only_the_first": lambda: config.graph[:1],
    }
    value = known[word]() if word in known else json.loads(word)
    changed: Any = copy.copy(getattr(config, outer) if outer else config)
    vars(changed)[last] = tuple(value) if isinstance(value, list) else value
    whole: Any = {outer: changed}
    found: TrainConfig = dataclasses.replace(config, **whole) if outer else changed
    return found


# ---- a rank's faults


def runs_on(device: str) -> bool:
    """Whether this process has the GPU of that number, or may run on the CPU core."""
    if gpu := own_gpu():
        return gpu in (device, *(each.id for each in describe_machine({}).gpus[int(device) :][:1]))
    return int(device) in os.sched_getaffinity(0)


class Plant:
    """The planted faults of one rank; does nothing on the ranks that they do not name."""

    def __init__(self, spec: RunSpec, rank: int, file: RecordFile) -> None:
        self._rank, self._file = rank, file
        self._faults: list[tuple[PlantSpec, dict[str, list[Act]]]] = []
        self._alters = {}
        for fault in each_of(spec.plant):
            is_here = CATALOGUE[fault.fault].everywhere or rank == fault.rank % spec.world_size
            if fault.device:
                is_here = runs_on(fault.device)
            is_here = is_here and not (fault.once and is_timed(spec))
            self._faults.append((fault, injections(fault) if is_here else {}))
            if is_here and (alter := alteration(fault)) is not None:
                self._alters[fault.fault] = alter
                file.alter = self._alter
        self._drawn: dict[str, bool] = {}

    def draw(self, store: dist.Store) -> None:
        """Decide which faults of chance fire in this run: rank 0 does, and tells the others."""
        for spec, _ in self._faults:
            if spec.chance == 1.0:
                continue
            key = f"plant/{spec.fault}"
            if self._rank == 0:
                # Not from the seed: every run of a specification has a chance of its own.
                fires = random.SystemRandom().random() < spec.chance
                store.set(key, "fires" if fires else "rests")
            self._drawn[spec.fault] = store.get(key) == b"fires"
            if not self._drawn[spec.fault]:
                self._alters.pop(spec.fault, None)
        self._faults = [each for each in self._faults if self._drawn.get(each[0].fault, True)]

    def before_train(self, config: TrainConfig) -> TrainConfig:
        """The configuration that this rank really trains by."""
        for _, acts in self._faults:
            for act in acts.get("early", ()):
                config = act(config) or config
        return config

    def before_step(self, trainer: Trainer, step: int) -> None:
        for name, fires in self._drawn.items():
            self._write("chance", step, fault=name, fires=fires)
        self._drawn = {}
        for spec, acts in self._faults:
            if step == 0 and (acts.get("early") or acts.get("end")):
                self._write("planted", step, fault=spec.fault)
            if step >= spec.step:
                self._act(spec, acts.get("each"), trainer, step)
            if step == spec.step:
                self._act(spec, acts.get(""), trainer, step)
            if step == trainer.config.graph_warmup_steps:
                self._act(spec, acts.get("capture"), trainer, step)

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        for spec, acts in self._faults:
            if step == spec.step and "after" in acts:
                with on_its_stream(trainer):
                    self._act(spec, acts["after"], trainer, step)
                trainer.redigest_state()

    def after_end(self) -> None:
        for _, acts in self._faults:
            for act in acts.get("end", ()):
                act(None)

    def _alter(self, line: str) -> list[str]:
        lines = [line]
        for change in self._alters.values():
            lines = [altered for each in lines for altered in change(each)]
        return lines

    def _act(self, spec: PlantSpec, acts: list[Act] | None, trainer: Trainer, step: int) -> None:
        if not acts:
            return
        fault = CATALOGUE[spec.fault]
        is_said = step == spec.step or "step" not in fault.takes
        # No record may come after what it does; but which tensor it was, or whether the rank holds
        # what a fault of all ranks is planted in, is known only then.
        late = fault.everywhere or "tensor" in fault.takes
        if is_said and not late:
            self._write("planted", step, fault=spec.fault)
        try:
            found: list[Any] = [act(trainer) for act in acts]
        except NotHere:
            if fault.everywhere:
                return
            raise
        if is_said and late:
            tensor = {"tensor": found[0]} if "tensor" in fault.takes else {}
            self._write("planted", step, fault=spec.fault, **tensor)

    def _write(self, name: str, step: int, **detail: str | bool) -> None:
        self._file.write(EventRecord(name=name, rank=self._rank, step=step, detail=dict(detail)))


# ---- records: `record KIND WHEN CHANGE`, a step's the plant's or so much later, or any


def alteration(spec: PlantSpec) -> Callable[[str], list[str]] | None:
    """From a line of a rank's file to what is written in its place; None for other faults."""
    changes = [words for _, name, words in parsed(spec.fault) if name == "record"]
    kept = ["{}"]

    def alter(line: str) -> list[str]:
        try:
            plain = json.loads(line)
        except ValueError:  # another fault has been here
            return [line]
        for kind, when, change in changes:
            if kind in ("any", plain["kind"]) and (
                when == "any" or plain["step"] == spec.step + int(when)
            ):
                return _altered(change, line, plain, kept)
        return [line]

    return alter if changes else None


def _altered(change: str, line: str, plain: dict[str, Any], kept: list[str]) -> list[str]:
    if change in ("hold", "remember"):
        kept[:] = [line]
    if change == "cut":
        return [line[: len(line) // 2]]
    changed = {
        "of_next_rank": {"rank": plain.get("rank", 0) + 1},
        "of_other_run": {"run": plain.get("run", "")[:-1] + "x"},
        # As a ring that was not copied.
        "with_old_state": {"digests": json.loads(kept[-1]).get("digests", {})},
    }
    if change in changed:
        return [dumps(plain | changed[change])]
    return {"remember": [line], "append": [line, *kept], "repeat": [line, line]}.get(change, [])
