"""Plants the faults of `harness.faults.catalogue` in a rank, each injection at its moment.

The catalogue says which faults take a step, a rank or a tensor; the decoder requires the step.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.records import EventRecord, PlantSpec, RunSpec, dumps, each_of
from harness.worker import plants  # noqa: F401 - the catalogue names what is there
from harness.worker.injectors import Act, NotHere, injections, on_its_stream, parsed
from harness.worker.record_file import RecordFile


class Plant:
    """The planted faults of one rank; does nothing on the ranks that they do not name."""

    def __init__(self, spec: RunSpec, rank: int, file: RecordFile) -> None:
        self._rank, self._file = rank, file
        self._faults: list[tuple[PlantSpec, dict[str, list[Act]]]] = []
        self._alters = {}
        for fault in each_of(spec.plant):
            is_here = CATALOGUE[fault.fault].everywhere or rank == fault.rank % spec.world_size
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
        """Act before `step` runs."""
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
        """Act once the end record is written."""
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
