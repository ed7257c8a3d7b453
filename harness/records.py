"""What flows down the road: run and case specifications, rank records, outcomes, verdicts.

Every type is a frozen dataclass with `to_json` and `from_json`. Floats that are compared are kept
as raw bits beside a value for people, which is None for NaN and infinity. Lines of a rank's file:

    start    once: rank, world size, device, tensor names of each digest, environment fingerprint
    names    from a program that the harness did not write: tensor names from one step on
    initial  at most once: digests of the state before the first step
    step     once a step: losses, gradient norm, digests, non-finite tensors, memory
    event    any time: a named fact that is not compared (graph captured, fault planted)
    final    at most once: digests of the state as the program left it, after the last step
    error    at most once: the exception that ended the rank
    end      once, only if all steps ran
"""

import dataclasses
import hashlib
import re
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import msgspec

from harness.values import (
    Expect,
    FloatBits,
    Json,
    RecordError,
    SoakSpec,
    dumps,
    strict_loads,
    tolerance_of,
    ulp_distance,
)

__all__ = ["FloatBits", "Json", "RecordError", "dumps", "ulp_distance"]  # of values

SCHEMA_VERSION = 1
"""Of a rank's records, which `harness.recorder` writes as well."""
FOLDER_VERSION = 2
"""Of run folders, whose runs are found by their keys."""

Device = Literal["cpu", "cuda"]
Outcome = Literal["passed", "failed", "error", "skipped", "incomparable"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "error", "skipped", "incomparable")

What = Literal[
    "", "diverged", "nonfinite", "memory_regression", "throughput_regression", "over_limit",
    "noisy",
    "missing_step", "missing_rank", "record_after_end", "corrupt_record", "empty_run",
    "not_replayed", "not_compiled", "illegal_access", "oom", "hang", "crashed", "killed",
    "static_buffer", "stale_address", "stale_guards", "race", "capture_refused",
    "nondeterministic_reference", "no_control", "different_environment", "unsupported", "not_run",
    "interrupted", "shared_gpu", "other_parts", "same_data",
]  # fmt: skip
WHATS: tuple[What, ...] = typing.get_args(What)

DIGEST_GROUPS = ("grads", "weights", "optim", "rng")
"""The digests of a step, in the order in which a difference is looked for."""
SAMPLES, TOKENS = "samples", "tokens"
"""Group of what a rank of the built-in trainer reads in a step; the first tensor in it."""
GROUP_ORDER = (SAMPLES, "losses", "buffers", *DIGEST_GROUPS)
"""The same of a program that has more of them; a program's own groups come last."""
COPIES = "copies"  # group of what the built-in trainer computes with, kept between steps
OTHERS = "others"  # group of a program's modules that no optimizer trains: an EMA, a teacher
AFTER = " after the last step"
"""Ends names of groups in the last step's record that hold what a `FinalRecord` says."""
DIGEST_HEX_CHARS = 32  # of a tensor's 128 bits; a group is their concatenation in tensor order
TAP_HEX_CHARS = DIGEST_HEX_CHARS + 8  # a digest, and its place in the step
NEVER_RAN, ABSENT = "f" * 8, "f" * DIGEST_HEX_CHARS
"""In place of a place in the step, and of a digest: the step did not hold that tensor."""
UNFINISHED = "unfinished step"  # event of a rank that fails in a run with taps: their rows so far
Passed = Literal["", "forward", "backward", "reduce", "optimizer", "capture", "replay"]
"""The part of a step that an exception passed through; `replay`: of a graph of a whole step."""
MAX_KEPT_BYTES = 256 << 20
MAX_WORLD_SIZE = 1 << 17
"""Each rank is looked for: a damaged number must not keep a reader for ever."""


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    PASSED = 0
    FAILED = 1
    INTERRUPTED = 2
    INTERNAL = 3
    USAGE = 4
    NOTHING_RAN = 5
    NO_VERDICT = 6


# --- specifications ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlantSpec(Json):
    """A known fault to plant in a run, `beside` others, which have none beside themselves."""

    fault: str
    step: int = 0
    rank: int = -1  # the last
    tensor: str = ""  # a parameter's name, "" for the fault's own choice
    legs: tuple[str, ...] = ("candidate",)  # runs of a case that it is planted in
    chance: float = 1.0  # that it fires, decided once a run
    device: str = ""  # GPU or CPU core, by its number: only processes on it, whatever their rank
    once: bool = False  # not in repeats of a run
    beside: "tuple[PlantSpec, ...]" = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        # As it is read back from JSON, or another key would come of it.
        object.__setattr__(self, "chance", float(self.chance))

    @property
    def each(self) -> "tuple[PlantSpec, ...]":
        return (dataclasses.replace(self, beside=()), *self.beside)


def joined(plants: Iterable[PlantSpec]) -> PlantSpec | None:
    """All of them as one; None if there are none."""
    held = [fault for plant in plants for fault in plant.each]
    return dataclasses.replace(held[0], beside=tuple(held[1:])) if held else None


def each_of(plant: PlantSpec | None) -> tuple[PlantSpec, ...]:
    """The faults of a plant, none of no plant."""
    return () if plant is None else plant.each


@dataclass(frozen=True, kw_only=True)
class KeepSpec(Json):
    """Contents of tensors that every rank writes down, as they were digested in one step.

    `names`: `grads:layers.0.attn.attention.wq.weight`, a digest group and a name in it, or
    `layers.1.attn:output[1]`, a row of taps; a star is any text. More than `max_bytes` are an error
    of the rank.
    """

    step: int
    names: tuple[str, ...]
    max_bytes: int = MAX_KEPT_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, amount in {"step": self.step + 1, "names": len(self.names),
                             "max_bytes": self.max_bytes}.items():  # fmt: skip
            if amount < 1:
                raise RecordError(f"keep.{name}: expected one or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class OperatorSpec(Json):
    """Operators that every rank writes down: of a module's calls in one step, or their backward."""

    step: int
    module: str
    call: int | None = None  # its number in the step; None for all
    backward: bool = False
    kept: int | None = None  # the one whose tensors are kept, as `operator:input 0`, if `keep` asks


@dataclass(frozen=True, kw_only=True)
class RunSpec(Json):
    """One unique training run."""

    config: dict[str, Any]  # `TrainConfig.to_dict()`, or a program (`harness.program.spec`)
    device: Device
    world_size: int
    timeout_s: float
    replica: int = 0  # 1 is the control, higher ones are repeats for times
    plant: PlantSpec | None = None
    soak: SoakSpec | None = None  # None: the steps of its configuration and no more
    keep: KeepSpec | None = None
    operators: OperatorSpec | None = None
    rounding: int = 0  # seed of a run that rounds at random, 0 for all others
    # Of which steps a program's gradients are also written as `harness.recorder.state`.
    sketch: Literal["none", "first", "all"] = "none"
    stall_s: float | None = None  # seconds without a record after which it counts as hung
    placed: tuple[str, ...] = ()  # GPU or CPU cores of each rank; () where the engine has room
    recorded: str = ""  # its name in start records, if it was recorded by hand or under another key

    def __post_init__(self) -> None:
        super().__post_init__()
        # An int here would give another key than the same specification read back from JSON.
        object.__setattr__(self, "timeout_s", float(self.timeout_s))
        if self.world_size > MAX_WORLD_SIZE:
            most = f"at most {MAX_WORLD_SIZE}"
            raise RecordError(f"world_size: expected {most}, got {self.world_size}")
        graph = self.config.get("graph", ())
        if not isinstance(graph, list | tuple) or not all(isinstance(n, str) for n in graph):
            raise RecordError(f"config.graph: expected a list of names, got {graph!r:.80}")

    @cached_property
    def key(self) -> str:
        """File-name-safe identity: equal keys mean equal work."""
        # Without defaults: a field that is added leaves the keys of runs without it as they are.
        held = (
            (name, getattr(self, name), f.default) for name, f in self.__dataclass_fields__.items()
        )
        said = {name: value for name, value, default in held if value != default}
        digest = hashlib.sha256(self._hashed(said)).hexdigest()[:12]
        return f"w{self.world_size}-{self._short_name}-r{self.replica}-{digest}"

    def _hashed(self, said: dict[str, Any]) -> bytes:
        with suppress(UnicodeEncodeError):  # msgspec encodes no lone surrogate; `dumps` does
            if self.is_builtin:
                # In a quarter of the time; NaN would be null: no rule of a configuration allows it.
                return msgspec.json.encode(said, order="deterministic")
        plain = {k: v.to_json() if isinstance(v, Json) else v for k, v in said.items()}
        return dumps(plain).encode()

    @property
    def is_builtin(self) -> bool:
        return self.config.get("program") is None

    @property
    def _short_name(self) -> str:
        if self.is_builtin:
            return "+".join(self.config.get("graph", ())) or "eager"
        target = str(self.config["program"].get("target", ""))
        name = target.rpartition("/")[2].removesuffix(".py")
        return re.sub(r"[^A-Za-z0-9_.]", "_", name)[:60] or "program"


@dataclass(frozen=True, kw_only=True)
class CaseSpec(Json):
    """A candidate against its reference, which also runs against its own control.

    Of runs that were recorded by hand the control may be the reference itself: there is none then,
    and a difference is no failure.
    """

    id: str
    scenario: str
    labels: dict[str, str]
    reference: RunSpec
    control: RunSpec
    candidate: RunSpec
    expect: Expect  # `bitwise` or a tolerance
    checks: dict[str, dict[str, Any]]
    skip_reason: str = ""
    repeats: int = 0  # more runs of each of both, for their times (`harness.repeats`)
    confirm: bool = False  # run both once more where their bits differ

    def __post_init__(self) -> None:
        super().__post_init__()
        tolerance_of(self.expect)

    @property
    def has_control(self) -> bool:
        """Whether the reference was run twice; of recorded runs it may not have been."""
        return self.control.key != self.reference.key


# --- records of a rank ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StartRecord(Json):
    """First line of a rank."""

    schema: int
    rank: int
    world_size: int
    pid: int
    device: str
    tensors: dict[str, tuple[str, ...]]  # names of each digest group, in digest order
    environment: dict[str, Any]
    taps: tuple[str, ...] = ()  # rows: `layers.3.attn:output[1]`, of the second call of a step
    tap_stages: tuple[int, ...] = ()  # of the pipeline, that the module of each row is in
    run: str = ""  # the key of the run
    kind: Literal["start"] = "start"


@dataclass(frozen=True, kw_only=True)
class StepRecord(Json):
    """One step of one rank."""

    step: int
    rank: int
    # float32, the mean over all tokens of all ranks; of a program, of the rank's microbatches.
    loss: FloatBits | None
    # Of the rank's own tokens, float32; of a program as it computed them, before a GradScaler.
    microbatch_losses: tuple[FloatBits, ...]
    grad_norm: FloatBits | None  # global, before clipping
    digests: dict[str, str]  # by group, concatenated in the order of `StartRecord.tensors`
    nonfinite: dict[str, tuple[str, ...]]  # names of tensors that hold a NaN or an infinity
    step_s: float  # from the end of the step before to its own, on the device
    live_bytes: int  # after the step
    peak_bytes: int  # so far
    taps: str = ""  # the rows, `TAP_HEX_CHARS` each
    pointer_changes: int | None = None  # long-lived tensors that moved since the step before
    device_bytes: int | None = None  # on the whole GPU by the driver, at the last step of a flush
    host_bytes: int | None = None  # of the rank's process, that no file holds
    skipped: str = ""  # why the optimizer did not take the step; "" where it did
    evaluation: FloatBits | None = None  # loss of the evaluation after it
    sketches: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of gradients
    kind: Literal["step"] = "step"


@dataclass(frozen=True, kw_only=True)
class NamesRecord(Json):
    """Names of tensors from step `step` on, for the groups that change; -1 is the initial state.

    Readers lay them over the steps, so that all of a `RankRecords` have the same tensors.
    """

    rank: int
    step: int
    tensors: dict[str, tuple[str, ...]]
    taps: tuple[str, ...] = ()
    shapes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # `float32[4, 8]`, of a job
    kind: Literal["names"] = "names"


@dataclass(frozen=True, kw_only=True)
class InitialRecord(Json):
    """Digests of the state before the first step, as in a step's record."""

    rank: int
    digests: dict[str, str]
    nonfinite: dict[str, tuple[str, ...]]
    kind: Literal["initial"] = "initial"


@dataclass(frozen=True, kw_only=True)
class FinalRecord(Json):
    """Digests of the state as the process ends, after the last step, `step`.

    Of a program only tensors that are still alive, with the name and shape that they had in that
    step. Readers add them to that step's record, as groups whose names end in `AFTER`.
    """

    rank: int
    step: int
    tensors: dict[str, tuple[str, ...]]
    digests: dict[str, str]
    nonfinite: dict[str, tuple[str, ...]]
    kind: Literal["final"] = "final"


@dataclass(frozen=True, kw_only=True)
class EventRecord(Json):
    """A named fact that is not compared."""

    name: str
    rank: int
    step: int
    detail: dict[str, Any] = field(default_factory=dict)
    kind: Literal["event"] = "event"


@dataclass(frozen=True, kw_only=True)
class StreamUse(Json):
    """An operator's use of memory on a stream; `place` is `file:line` of the program."""

    operator: str
    writes: bool
    stream: str
    place: str


@dataclass(frozen=True, kw_only=True)
class RaceEvidence(Json):
    """Two uses of one tensor's memory that nothing orders; `unit` is the FSDP unit, or ""."""

    tensor: str
    unit: str
    is_gradient: bool
    later: StreamUse
    earlier: StreamUse


@dataclass(frozen=True, kw_only=True)
class ErrorRecord(Json):
    """The exception that ended the rank, already classified by the rank itself."""

    rank: int
    step: int
    what: What
    type: str
    message: str
    traceback: str
    blames: int | None = None  # the rank that had failed before, as far as this one heard of it
    module: str = ""  # the innermost at work, by its dotted name
    phase: Passed = ""
    raised_at: str = ""  # `file.py:line function` of the innermost frame outside of torch
    tensors: tuple[str, ...] = ()  # names that the exception gives, the worst first
    race: RaceEvidence | None = None  # the first that the detector saw
    kind: Literal["error"] = "error"


Direction = Literal["forward", "backward", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class GraphUse(Json):
    """Graphs of one scope of one layer in one direction: how many were captured and launched."""

    scope: str
    layer: int  # -1 for full_iteration
    direction: Direction  # of full_iteration `gradients`, and `optimizer` if the graph holds it
    captures: int
    replays: int

    @property
    def place(self) -> str:
        return f"layers.{self.layer} {self.scope}" if self.layer >= 0 else self.scope

    @property
    def name(self) -> str:
        return f"{self.place}, {self.direction}"


@dataclass(frozen=True, kw_only=True)
class EndRecord(Json):
    """Last line of a rank that ran every step."""

    rank: int
    steps: int
    peak_bytes: int
    startup_s: float  # from process start to first step
    wall_s: float
    replays: int = 0  # launches of captured graphs
    graphs: tuple[GraphUse, ...] = ()  # of the built-in trainer
    compiled: tuple[str, ...] = ()  # parts of `config.compile` that the compiler made code of
    kind: Literal["end"] = "end"


Record = (
    StartRecord | NamesRecord | InitialRecord | StepRecord | FinalRecord | EventRecord | ErrorRecord
    | EndRecord
)  # fmt: skip
RECORD_KINDS: dict[str, type[Record]] = {
    each.__dataclass_fields__["kind"].default: each for each in typing.get_args(Record)
}


def parse_record(line: bytes | str) -> Record:
    """Decode one line of a rank's file (`RecordError`: it does not decode)."""
    try:
        plain = strict_loads(line)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise RecordError(f"expected an object, got {type(plain).__name__}")
    if (kind := RECORD_KINDS.get(str(plain.get("kind")))) is None:
        raise RecordError(f"unknown kind {plain.get('kind')!r:.80}")
    return kind.from_json(plain)


# --- what happened ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankExit(Json):
    """How one rank's process ended."""

    rank: int
    code: int | None  # negative for a signal, None if it never started
    killed_by_harness: bool = False
    errno: int = 0  # with which starting it failed
    is_stopped: bool = False  # SIGSTOP or a debugger held it when its time was up
    failed_at: float | None = None  # by itself, if seen; only the order among ranks counts


@dataclass(frozen=True, kw_only=True)
class Entered(Json):
    """A collective as ranks entered it, as `harness.engine.evidence.Place` has it."""

    operator: str
    label: str = ""  # whose it is, "" if that is not known
    in_capture: bool = False
    sizes: str = ""
    called_at: str = ""
    group: tuple[int, ...] = ()  # of global ranks, if it is not the fault's

    def __str__(self) -> str:
        """For people: `all_reduce of layers.1`, `all_reduce in a capture`."""
        whose = f" of {self.label}" if self.label else ""
        return self.operator + (whose or (" in a capture" if self.in_capture else ""))


@dataclass(frozen=True, kw_only=True)
class CollectiveFault(Json):
    """`ranks` that a collective lacks, or that are in another one than the rest of its group."""

    ranks: tuple[int, ...]
    entered: Entered | None  # by these, in its place
    others: tuple[int, ...]  # that wait for them
    expected: Entered
    group: tuple[int, ...]  # of global ranks, whose `number`th collective it is
    number: int
    step: int | None  # None if nobody counted
    is_new: bool = False  # these, and not the others, did otherwise than in steps before


@dataclass(frozen=True, kw_only=True)
class Ending(Json):
    """What ended a run, as fields of the rank at fault; empty where nothing is known."""

    exception: str = ""  # its type
    signal: str = ""
    raised_at: str = ""  # this and the next two as in its `ErrorRecord`
    phase: Passed = ""
    module: str = ""
    tensor: str = ""  # the first that it names
    collective: CollectiveFault | None = None  # in which ranks waited in vain
    machine: str = ""  # failure of the machine that the engine saw (`harness.checks.complete`)


@dataclass(frozen=True, kw_only=True)
class RunOutcome(Json):
    """What happened to one run, as the engine saw it: exit states, time, classification."""

    key: str
    what: What  # "" if every rank exited 0
    message: str
    culprit_rank: int | None = None  # failed first: the others often only report a lost connection
    ranks: tuple[RankExit, ...] = ()
    started_unix_s: float = 0.0
    wall_s: float = 0.0
    attempt: int = 0
    # A SIGKILL that neither the harness sent nor, by its own count, the kernel for want of memory.
    from_outside: bool = False
    undecided: bool = False  # whether its end was its own or that of another run on its GPUs
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class RankRecords:
    """One rank's decoded file."""

    rank: int
    start: StartRecord | None
    steps: tuple[StepRecord, ...]
    events: tuple[EventRecord, ...]
    error: ErrorRecord | None
    end: EndRecord | None
    problems: tuple[str, ...]  # lines that did not decode: 'line N: why'
    initial: InitialRecord | None = None
    after_end: tuple[str, ...] = ()  # the first of them that follows the end record

    def said(self, name: str, step: int | None = None) -> list[dict[str, Any]]:
        """Details of its events of that name, in their order; of one step, where one is given."""
        return [e.detail for e in self.events if e.name == name and step in (None, e.step)]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run as the checks see it: specification, outcome, records of every rank."""

    spec: RunSpec
    outcome: RunOutcome
    ranks: tuple[RankRecords, ...]


@dataclass(frozen=True, kw_only=True)
class Difference(Json):
    """Where two runs first differ. Empty strings and None where a level does not apply."""

    step: int
    rank: int
    quantity: str
    tensor: str = ""
    reference: str = ""
    candidate: str = ""
    ulps: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckResult(Json):
    """Answer of one check. `message` is for people; `ending` is of the run that was not whole."""

    check: str
    outcome: Outcome
    what: What
    message: str
    difference: Difference | None = None
    figures: dict[str, float] = field(default_factory=dict)
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class Confirmation(Json):
    """Whether a difference came again where both sides were run once more.

    `came_again`: the first difference is the same, in place and bits; `differs_otherwise`: another.
    """

    outcome: Literal["came_again", "differs_otherwise", "did_not_come_again", "not_made"]
    reference_repeats: bool | None = None  # every bit of the first run; None if not made
    candidate_repeats: bool | None = None
    difference: Difference | None = None  # the first between the repeats
    what: What = ""  # is wrong with one of them
    runs: dict[str, str] = field(default_factory=dict)  # keys of `reference` and `candidate`


@dataclass(frozen=True, kw_only=True)
class Verdict(Json):
    """The answer for one case: that of the first result that decided, which is of `check`."""

    case_id: str
    outcome: Outcome
    what: What
    message: str
    checks: tuple[CheckResult, ...] = ()
    runs: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    difference: Difference | None = None
    check: str = ""
    ending: Ending | None = None
    confirmation: Confirmation | None = None  # evidence, which changes no outcome


GIVEN = "given"
"""Name of the event that says what a rank gave to collectives."""


@dataclass(frozen=True, kw_only=True)
class GivenCall(Json):
    """A collective that a rank entered: whose it is, as far as that is known, the global ranks of
    its group, and the digest, in hex, of the tensors that the rank brought along."""

    operator: str
    label: str
    group: tuple[int, ...]
    digest: str


def given_in(records: RankRecords, step: int) -> tuple[GivenCall, ...]:
    """In the order in which the rank entered them; empty where nothing was written down."""
    return tuple(
        GivenCall.from_json(call) for d in records.said(GIVEN, step) for call in d["calls"]
    )


OPERATORS = "operators"
"""Name of the event that has the operators which a run was asked to write down."""


@dataclass(frozen=True, kw_only=True)
class OperatorCall(Json):
    """An operator as it ran: its `number` among those written down, the program's `stack` from the
    outermost frame on (`train.py:12 Model.forward`), `settings` that are no tensors, digests
    of its tensors ("" without one), and names of inputs ("" if unknown)."""

    operator: str
    number: int = 0
    stack: tuple[str, ...] = ()
    settings: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: `aten._softmax.default(dim=-1) at train.py:12`."""
        where = f" at {self.line}" if self.line else ""
        return f"{self.operator}({self.settings}){where}"

    @property
    def line(self) -> str:
        """Of the program, which called it: `train.py:12`; "" if unknown."""
        return self.stack[-1].rpartition(" ")[0] if self.stack else ""


@dataclass(frozen=True, kw_only=True)
class OperatorCalls(Json):
    """What a rank wrote down: of how many calls of the module; `why` not all of it can be seen."""

    calls: tuple[OperatorCall, ...] = ()
    num_calls: int = 0
    is_cut: bool = False
    why: str = ""


def operators_in(records: RankRecords) -> OperatorCalls:
    """Empty where nothing was written down."""
    said = records.said(OPERATORS)
    return OperatorCalls.from_json(said[0]) if said else OperatorCalls()
