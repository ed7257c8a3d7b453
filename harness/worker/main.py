"""One rank: join the others, train, write records, say what went wrong.

Everything heavy is imported at module level on purpose: the forkserver imports this module once,
and every rank is a fork of it.
"""

import contextlib
import faulthandler
import inspect
import itertools
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo  # the first collective imports it: a second that no rank should pay
import torch.distributed as dist
from torch import nn

from fsdp_core.config import ConfigError, TrainConfig
from fsdp_core.device import Device, prepare_environment
from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp.api import FSDPModule
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.unit import Unit
from fsdp_core.graph.capture_session import CaptureAborted, CaptureLost
from fsdp_core.graph.graph import CapturedFunction, Replayed
from fsdp_core.graph.recorder import CaptureRefused, StaleAddress
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import BackendMissing
from fsdp_core.model.sharding import clip_grads
from fsdp_core.parallel.mesh import build_axes, init_ranks
from fsdp_core.parallel.pipeline import Pipeline
from fsdp_core.stress.races import Race, RaceFound
from fsdp_core.stress.stressors import StressorMissing
from fsdp_core.train import make_trainer
from fsdp_core.train.build import AdamW
from fsdp_core.train.compiled import StaleGuards
from fsdp_core.train.engines import EngineAdamW
from fsdp_core.train.trainer import Trainer, load_state, mean_loss, save_state
from harness import provenance
from harness.engine.evidence import place_path
from harness.engine.machine import GATE_VARIABLE, die_with_parent, signal_quietly, wait_for_go
from harness.engine.outcome import FirstFailure, claim, find
from harness.engine.ranks import flush_output
from harness.masking import Masker
from harness.program.spec import program_of, run_program
from harness.provenance import package_version
from harness.recorder import UNRECORDED, RecordFile, RecordsUnwritable
from harness.recorder.rounding import RandomRounding
from harness.recorder.session import age_s, failures_of, raised_at
from harness.records import (
    SCHEMA_VERSION,
    EndRecord,
    ErrorRecord,
    EventRecord,
    GraphUse,
    Passed,
    RaceEvidence,
    RunSpec,
    StartRecord,
    StreamUse,
    What,
)
from harness.repeats import is_timed
from harness.values import Json, SoakSpec, taking_turns, turn_of
from harness.worker.observe import (
    Notes,
    Observer,
    Watched,
    digest_time_event,
    keeper,
    memory_event,
    noted,
)
from harness.worker.plant import Plant

PACKAGES = ("numpy", "transformer-engine", "triton")
"""Whose versions decide bits, torch aside."""
SEEDS_OF_RUN = 1 << 20
"""Seeds of roundings: one rank's follows another's, those of runs are further apart."""
CHECKPOINT = "checkpoint"
"""Of a run that resumes: in its folder, until it was loaded."""
PATIENCE = timedelta(seconds=1)
"""How long a rank that lost another waits to be told why."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """Run one rank to its end; 0, 1 after an error record, `UNRECORDED` for want of disk space.

    Records go to `rank<R>.jsonl` in the folder; the GPU is the one of the rank's number among the
    visible ones; `store_port` is of the run's TCPStore, on MASTER_ADDR.
    """
    if (program := program_of(spec.config)) is not None:
        return run_program(program, folder, spec.key)
    if not (resume_at := spec.config.get("resume_at", 0)):
        return _take_part(spec, folder, rank, store_port, Part())
    # The first steps in a process of their own; this one has done nothing yet, and begins anew.
    first = Part(stop=resume_at)
    if code := _in_child(lambda: _take_part(spec, folder, rank, store_port, first)):
        return code
    return _take_part(spec, folder, rank, store_port, Part(start=resume_at))


class Part(NamedTuple):
    """Steps that one process of a run takes: from `start` on, up to `stop`."""

    start: int = 0
    stop: float = math.inf


def _in_child(work: Callable[[], int]) -> int:
    """The exit code of `work` in a process that dies with this one, which dies by its signal.

    Requests for stacks meanwhile are the child's to answer.
    """
    flush_output()
    this, code = os.getpid(), 1
    if (child := os.fork()) == 0:
        try:
            die_with_parent(this)
            code = work()
        except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(code)
    faulthandler.unregister(signal.SIGUSR1)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signal_quietly(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        faulthandler.disable()
        with contextlib.suppress(OSError):  # SIGKILL is as it is
            signal.signal(-code, signal.SIG_DFL)
        os.kill(this, -code)
    signal.signal(signal.SIGUSR1, before)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.pop(GATE_VARIABLE, None)  # the child has waited there
    return code


def _take_part(spec: RunSpec, folder: Path, rank: int, store_port: int, part: Part) -> int:
    try:
        session = _Session(spec, folder, rank, part)
        try:
            session.run(store_port)
        except RecordsUnwritable:
            raise
        except Exception as error:  # noqa: BLE001 - the record is how a rank says what happened
            session.fail(error)
            return 1
    except RecordsUnwritable as error:
        sys.stderr.write(f"{error}\n")
        return UNRECORDED
    return 0


class _Session:
    def __init__(self, spec: RunSpec, folder: Path, rank: int, part: Part) -> None:
        self.spec, self.rank, self.folder, self.part = spec, rank, folder, part
        self.file = RecordFile(folder / f"rank{rank}.jsonl")
        self.config = TrainConfig()  # of the specification, once it was read
        self.plant = Plant(spec, rank, self.file)
        self.step = part.start - 1
        self.is_recorded = True
        self.store: dist.Store | None = None
        self.stages: list[torch.nn.Module] = []
        old_s = age_s()
        self.started_unix_s, self.started_s = time.time() - old_s, time.monotonic() - old_s
        self.part_started_s = time.monotonic() if part.start else self.started_s

    def run(self, store_port: int) -> None:
        prepare_environment()
        torch.set_num_threads(1)
        if self.spec.device == "cpu" and hasattr(os, "SCHED_BATCH"):
            # Gloo's threads spin where they preempt each other on a machine of few cores.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        gpu = int(os.environ["LOCAL_RANK"]) if self.spec.device == "cuda" else 0
        device = Device(self.spec.device, gpu)
        self.store = join_store(store_port)
        # Keys of the processes that took the first steps say nothing to those after them.
        own = dist.PrefixStore("resumed", self.store) if self.part.start else self.store
        self.config = config = TrainConfig.from_dict(self.spec.config)
        if config.begins_elsewhere and not self.part.start:
            self.config = config = config.before_resuming()
            self.is_recorded = False
        else:
            self.plant.draw(own)
            config = self.plant.before_train(config)
        init_ranks(device, own, self.rank, self.spec.world_size, self.spec.timeout_s)
        axes = build_axes(config.parallel, device)
        device.synchronize()  # makes the context of a GPU, where nothing has yet
        if (went_s := wait_for_go()) > self.started_s:
            self.started_s = self.part_started_s = went_s
            self.started_unix_s = time.time()
        place = place_path(self.folder, self.rank)
        warm_up = self.part.start + config.graph_warmup_steps
        notes = noted(device, place, lambda: self.step, warm_up, gives=bool(config.taps))
        with device.counting_memory(), notes as noting:
            trainer = make_trainer(config, axes, device)
            self.stages = list(trainer.stages)
            if self.is_recorded:
                self._train(trainer, noting)
            else:
                self._train_elsewhere(trainer)
            if self.part.stop < math.inf:
                save_state(trainer, self.folder / CHECKPOINT, int(self.part.stop))
            # A process group must not be destroyed while a graph that used it is alive.
            trainer.close()
        dist.destroy_process_group()

    def _train(self, trainer: Trainer, notes: Notes) -> None:
        spec, rank, file, device = self.spec, self.rank, self.file, trainer.device
        operators = Watched(spec, trainer)
        keep = keeper(spec, rank, self.folder, trainer, operators.kept)
        rounding = rounded(spec, rank)
        observer = Observer(trainer, rank, file)
        environment = {"fingerprint": fingerprint(trainer), **provenance.about_rank(),
                       "started_unix_s": self.started_unix_s}  # fmt: skip
        if not self.part.start or self.config.begins_elsewhere:
            file.write(
                StartRecord(
                    schema=SCHEMA_VERSION, run=spec.key, rank=rank, world_size=spec.world_size,
                    pid=os.getpid(), device=device.name, tensors=observer.tensor_names,
                    taps=tuple(trainer.taps.names), tap_stages=tuple(trainer.taps.stages),
                    environment=environment,
                )
            )  # fmt: skip
            file.write(observer.initial())
        if self.part.start:
            load_state(trainer, self.folder / CHECKPOINT)
            if rank == 0:
                shutil.rmtree(self.folder / CHECKPOINT)
        device.synchronize()
        startup_s = time.monotonic() - self.part_started_s
        try:
            soaking = Soaking(spec, rank, trainer, self.store, file.write, first=self.part.start)
            steps = itertools.takewhile(lambda step: step < self.part.stop, soaking.steps())
            for self.step in steps:
                observer.begin()
                notes.begin()
                self.plant.before_step(trainer, self.step)
                with rounding, self._modules_noted(notes), operators.of(self.step):
                    trainer.step(self.step)
                self.plant.after_step(trainer, self.step)
                observer.observe(self.step)
                keep(self.step)
                if notes.given is not None:
                    file.write(notes.given_event(rank, self.step))
        finally:
            self._flush(observer)
            operators.write(rank, file)
        if self.part.stop < math.inf:
            return
        file.write(observer.final(self.step))
        soaking.write_event()
        file.write(observer.graphs_event(self.step))
        file.write(memory_event(trainer, rank, self.step))
        peak_bytes = device.peak_bytes()
        if is_timed(spec) and not device.is_cuda:
            file.write(digest_time_event(trainer, rank, self.step))
        file.write(
            EndRecord(
                rank=rank, steps=self.step + 1, peak_bytes=peak_bytes, startup_s=startup_s,
                wall_s=time.monotonic() - self.started_s, replays=trainer.counts.replays,
                graphs=tuple(GraphUse(**vars(use)) for use in trainer.graph_uses),
                compiled=trainer.parts_compiled,
            )
        )  # fmt: skip
        self.plant.after_end()

    def _train_elsewhere(self, trainer: Trainer) -> None:
        rounding = rounded(self.spec, self.rank)
        for step in range(int(self.part.stop)):
            self.step = step
            with rounding:
                trainer.step(step)

    def _modules_noted(self, notes: Notes) -> contextlib.AbstractContextManager[None]:
        """In the step that captures; compiled code would be guarded against what notes them."""
        config = self.spec.config
        is_it = config["graph"] and not config["compile"]
        captures = is_it and self.step == self.part.start + config["graph_warmup_steps"]
        return notes.modules(self.stages) if captures else contextlib.nullcontext()

    def _flush(self, observer: Observer) -> None:
        """Write the steps that wait in the ring, also when the step after them has failed."""
        failing = sys.exc_info()[1] is not None
        if failing and self.spec.device == "cuda" and self.spec.world_size > 1:
            # Copying from the device may wait for a collective that the others never join.
            return
        try:
            observer.flush()
            if failing and (unfinished := observer.unfinished(self.step)):
                self.file.write(unfinished)
        except RuntimeError as error:
            # After an illegal access the device answers nothing any more: what it held is lost.
            if not failing:
                raise
            sys.stderr.write(f"steps not yet flushed are lost: {error}\n")

    def fail(self, error: Exception) -> None:
        """Write the error record; the rank exits without touching the device again."""
        masker = Masker(os.environ)
        text = masker.text("".join(traceback.format_exception(error)))
        sys.stderr.write(text)
        before = self._failed_before(error)
        message, blames = masker.text(str(error))[:4000], None if before is None else before.rank
        if before is not None and not isinstance(error, CaptureAborted | CaptureLost):
            message += f"; before that, rank {before.rank} failed: {masker.text(before.told)}"
        try:
            self.file.write(
                ErrorRecord(
                    rank=self.rank, step=self.step, what=classify(error), type=type(error).__name__,
                    message=message, traceback=text[-8000:], blames=blames,
                    **evidence_of(error, self.stages),
                )
            )  # fmt: skip
        finally:
            if before is None:
                told = f"{type(error).__name__}: {message}".partition("\n")[0]
                when = f"at step {self.step}" if self.step >= 0 else "before its first step"
                claim(self.store, FirstFailure(self.rank, f"{when}: {told}"))

    def _failed_before(self, error: Exception) -> FirstFailure | None:
        """Which rank had failed before this one, if this one's error only follows from that."""
        if isinstance(error, CaptureAborted | CaptureLost):
            first, why = next(iter(error.refusals.items()), (self.rank, ""))
            alone = isinstance(error, CaptureAborted) and self.rank in error.refusals
            return None if alone or first == self.rank else FirstFailure(first, why)
        if "peer_lost" not in failures_of(type(error).__name__, str(error)):
            return None
        found = find(self.store, PATIENCE)
        return None if found is None or found.rank == self.rank else found


def rounded(spec: RunSpec, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Inside, operators of this rank round at random, if the run does; for each step anew."""
    if not spec.rounding:
        return contextlib.nullcontext()
    return RandomRounding(spec.rounding * SEEDS_OF_RUN + rank)


def join_store(port: int) -> dist.Store:
    """The run's rendezvous store: torchrun's own where that started us, a part of it then."""
    store = dist.TCPStore(os.environ.get("MASTER_ADDR", "127.0.0.1"), port)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return store if restart is None else dist.PrefixStore(f"harness/{restart}", store)


_MEANINGS: dict[type[BaseException], What] = {
    StaleAddress: "stale_address", StaleGuards: "stale_guards", RaceFound: "race",
    BackendMissing: "unsupported", ConfigError: "unsupported", StressorMissing: "unsupported",
}  # fmt: skip


def classify(error: BaseException) -> What:
    """What an exception means, following its causes."""
    meant = failures_of(type(error).__name__, str(error))
    for kind, what in _MEANINGS.items():
        if isinstance(error, kind):
            return what
    if isinstance(error, MemoryError) or meant & {"out_of_memory", "no_host_memory"}:
        return "oom"
    if "illegal_access" in meant:
        return "illegal_access"
    cause = error.__cause__ or error.__context__
    # Of a capture that another rank gave up, that rank says why.
    elsewhere = cause is None and isinstance(error, CaptureAborted | CaptureLost)
    if elsewhere or isinstance(error, CaptureRefused):
        return "capture_refused"
    return classify(cause) if cause is not None else "crashed"


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """What must agree between two runs before their bits may be compared."""
    device = trainer.device
    found = provenance.of_rank(torch) | {
        "device": device.name,
        "data": trainer.data_checksum,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "code": os.environ.get(provenance.CODE_VARIABLE) or provenance.code(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
    }
    world_size = str(dist.get_world_size())
    if (local := os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        # Collectives may sum in another order where ranks are spread otherwise over the nodes.
        found["ranks_on_node"] = local
    return found | (provenance.of_gpu(torch) if device.is_cuda else {})


# --- the steps of a run: as many as its configuration says, or as a soak asks for -----------------

# A soak by replays or by duration ends on all ranks at the same step, though ranks count for
# themselves. Every `flush_every` steps, when the host waits for the device anyway, each rank says
# in the run's store whether it has enough, and goes on or stops as rank 0 answers:
#
#     rank r    soak/<step>/<r> = 0 | 1     then waits for the answer
#     rank 0    reads all of these          soak/<step> = go | stop
#
# No collective and no tensor is involved, so what is computed does not change. Keys of an answer
# are deleted at the next one: by then every rank has read it.


class Soaking:
    """Counts the steps of one rank, and says whose turn it is; a rank alone needs no store."""

    def __init__(
        self, spec: RunSpec, rank: int, trainer: Trainer, store: Any,
        write: Callable[[Json], None], first: int = 0,
    ) -> None:  # fmt: skip
        self._soak, self._world_size, self._rank = spec.soak, spec.world_size, rank
        self._trainer, self._store, self._write = trainer, store, write
        self._began_s = time.monotonic()
        self._done, self._turns = first, 0
        self._asked = ""

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to take; whoever asks for the next has taken the last."""
        config, soak = self._trainer.config, self._soak
        while self._done < config.steps or (soak is not None and soak.is_open):
            is_asked = self._done >= config.steps and self._done % config.flush_every == 0
            if soak is not None and is_asked and self._is_enough(soak):
                return
            if soak is not None and soak.turn_steps and self._done % soak.turn_steps == 0:
                self._take_turn(soak.turn_steps)
            yield self._done
            self._done += 1

    def write_event(self) -> None:
        """Say what was done, for who judges whether it was as much as was asked."""
        if self._soak is None:
            return
        counts = self._trainer.counts
        detail = {
            "steps": self._done, "replays": counts.replays, "captured": counts.captured,
            "trained_s": time.monotonic() - self._began_s, "turns": self._turns,
        }  # fmt: skip
        self._write(EventRecord(name="soaked", rank=self._rank, step=self._done - 1, detail=detail))

    def _take_turn(self, turn_steps: int) -> None:
        trainer = self._trainer
        if trainer.stressors is None:
            return
        config = trainer.config
        names = turn_of(config.stress, config.stress_seed, self._done // turn_steps)
        trainer.take_turn(names)
        self._turns += 1
        detail = {"stress": list(names)}
        self._write(EventRecord(name="turn", rank=self._rank, step=self._done, detail=detail))

    def _is_enough(self, soak: SoakSpec) -> bool:
        stressors = taking_turns(self._trainer.config.stress)
        if self._done < soak.turn_steps * len(stressors):
            return False  # on every rank alike
        if soak.by == "duration":
            mine = self._rank != 0 or time.monotonic() - self._began_s >= soak.amount
        else:
            mine = self._trainer.counts.replays >= soak.amount
        return mine if self._world_size == 1 else self._agree(mine)

    def _agree(self, mine: bool) -> bool:  # noqa: FBT001 - what the store is told
        store, key = self._store, f"soak/{self._done}"
        store.set(f"{key}/{self._rank}", "1" if mine else "0")
        if self._rank == 0:
            votes = [f"/{rank}" for rank in range(self._world_size)]
            said = [store.get(key + vote) for vote in votes]  # of every rank: it is deleted later
            store.set(key, "stop" if set(said) == {b"1"} else "go")
            for vote in ("", *votes) if self._asked else ():
                store.delete_key(self._asked + vote)
            self._asked = key
        return bool(store.get(key) == b"stop")


# --- what an exception says of itself, in fields: by its attributes, and the frames it went through

# A function is known by its code, not by its file or name in a printed traceback: one that is
# renamed fails here at import.
_PHASES: tuple[tuple[Passed, tuple[Callable[..., Any], ...]], ...] = (
    ("capture", (Trainer._capture,)),
    ("replay", (CapturedFunction.__call__,)),
    ("backward", (Pipeline._backward, torch.autograd.backward)),
    ("optimizer", (AdamW.step, EngineAdamW.step)),
    ("forward", (Pipeline._forward, DecoderStage.forward)),
    ("reduce", (clip_grads, Trainer._require_grads, EngineAdamW.require_grads)),
    ("forward", (
        Pipeline.forward_backward, FSDPModule.zero_main_grads, FSDPModule.refresh_model_weights,
        mean_loss,
    )),
)  # fmt: skip
"""Functions of a step by what is done in them; of several that are at work, the first here.

A capture calls all that a step calls, and a backward pass may compute a forward again.
"""
_CODES: dict[CodeType, int] = {
    inspect.unwrap(function).__code__: place
    for place, (_, functions) in enumerate(_PHASES)
    for function in functions
}


def evidence_of(error: BaseException, stages: Sequence[nn.Module]) -> dict[str, Any]:
    """The fields `module`, `phase`, `raised_at`, `tensors` and `race` of an `ErrorRecord`.

    `module` is the innermost module, or unit of sharding, in whose code the exception was raised;
    "" if no frame belongs to one but the whole model.

    Args:
        stages: whose modules have the names that they have in the whole model.
    """
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    names = {id(module): name for stage in stages for name, module in stage.named_modules()}
    # What it was raised from comes first: a capture that was given up says so from far outside of
    # what could not be captured.
    frames = [[frame for frame, _ in traceback.walk_tb(each.__traceback__)] for each in chain]
    owners = [_owner(frame, names) for own in frames[::-1] for frame in own[::-1]]
    places = [_CODES[f.f_code] for own in frames for f in own if f.f_code in _CODES]
    return {
        "module": next(filter(None, owners), ""),
        "phase": _PHASES[min(places)][0] if places else "",
        "raised_at": raised_at(chain[-1], but=("torch",)),
        "tensors": next((tuple(e.names) for e in chain if isinstance(e, TensorError)), ()),
        "race": next((_race(e.races[0]) for e in chain if isinstance(e, RaceFound)), None),
    }


def _owner(frame: FrameType, names: dict[int, str]) -> str:
    """The name of that whose method a frame is of."""
    owner = frame.f_locals.get("self")
    if isinstance(owner, Unit | ParamGroup):
        return "" if owner.name == "root" else owner.name
    if isinstance(owner, Replayed):
        # What a capture leaves undone is refused at its end, when no module runs any more.
        name = owner.name.partition(" ")[0]  # without the slot
        return name if name in names.values() else ""
    return names.get(id(owner), "") if isinstance(owner, nn.Module) else ""


def _race(race: Race) -> RaceEvidence:
    later, earlier = (
        StreamUse(operator=use.operator, writes=use.writes, stream=use.stream.name, place=use.place)
        for use in (race.later, race.earlier)
    )
    return RaceEvidence(
        tensor=race.name, unit=race.unit, is_gradient=race.is_gradient, later=later, earlier=earlier
    )
