"""Where a run failed that did not just compute otherwise: it died, hung, or said why it stopped.

    stale_address      the tensor that moved; a graph still held its place      state
    race               the memory, and its two uses that nothing orders         by its streams
    hang               the collective that somebody never entered, or mistook   by the collective
    crashed, oom, ...  the step, and whether a graph was being made             capture, outside
    not_replayed       graphs that were not made or not used                    capture
    lost records       the first that is missing or damaged                     outside

The words of errors are our own, so what they name can be read off them.
"""

import re
from dataclasses import replace

from harness.bisector.flow import module_of
from harness.bisector.found import Location, Near
from harness.checks.complete import find_flaw
from harness.checks.steps import rank_table
from harness.errors import one_line
from harness.faults.fault import Phase
from harness.records import ErrorRecord, RunResult, What

NAMES_ITS_TENSOR: tuple[What, ...] = ("stale_address", "race", "capture_refused", "stale_guards")
"""What a run ends with that names its own cause: a difference in the same step only follows."""
AT_CAPTURE: tuple[What, ...] = ("capture_refused", "not_replayed", "not_compiled", "stale_guards")
LOST: tuple[What, ...] = (
    "missing_step", "missing_rank", "corrupt_record", "record_after_end", "empty_run",
)  # fmt: skip
MAX_CHARS = 300

_STALE = re.compile(r"^(?:stale_address: )?(.+?): (?:captured at|freed since|.*)")
_RACE = re.compile(r"^race: (.+?): (\S+ (?:reads|writes) on stream (\S+) at .+?), (.+), unordered")
_STREAM = re.compile(r"on stream (\S+)")
_NEVER = re.compile(
    r"^ranks? (?P<ranks>[\d, ]+) never entered (?P<operator>\w+)"
    r"(?: of (?P<label>\S+)| in a capture)?"
    r"(?: in step (?P<step>\d+))? \(collective \d+ of ranks (?P<group>[\d,]+)\)"
)
_ENTERED = re.compile(
    r"^ranks? (?P<ranks>[\d, ]+) entered (?P<operator>\w+)"
    r"(?: of (?P<label>\S+)| in a capture)? where ranks? "
    r"(?P<others>[\d, ]+) entered (?P<expected>\w+)(?: of (?P<whose>\S+)| in a capture)?"
    r"(?: in step (?P<step>\d+))?"
)
_WHERE: tuple[tuple[re.Pattern[str], Phase], ...] = (
    (re.compile(r"_engine_run_backward|/fsdp_core/fsdp/backward\.py"), "backward"),
    (re.compile(r"/fsdp_core/(optim\.py|fsdp/optimizer\.py)"), "optimizer"),
    (re.compile(r"/fsdp_core/model/"), "forward"),
    (re.compile(r"/fsdp_core/fsdp/(clip|gradients)\.py|, in _require_grads\b"), "reduce"),
    (re.compile(r"/fsdp_core/(parallel|fsdp)/"), "forward"),
)
"""Files of a traceback, by what a step does there; the first that fits."""
_IN_CAPTURE = re.compile(r"/trainer\.py\", line \d+, in _capture\b|/fsdp_core/graph/capture")
_NO_GROUP = re.compile(
    r"could not resolve the process group|process group has not been initialized"
    r"|invalid process group specified", re.IGNORECASE,
)  # fmt: skip
"""What torch says of groups that are not there any more."""
_AT_WORK = re.compile(r" in module ([\w.]+)")
"""What the engine says of a rank that left no word, if the rank had noted it."""
_NAME = re.compile(r"[\w.]+")
_MODULE = re.compile(r"\b(layers\.\d+(?:\.\w+)*|embedding|norm|head)\b")


def how_it_ended(run: RunResult) -> Location | None:
    """Where a run went wrong, by what ended it; None if it is whole."""
    flaw = find_flaw(run)
    if flaw is None:
        return None
    rank, error = _speaker(run, flaw.rank)
    found = Location(
        step=_step(run, flaw.step, rank, error), rank=rank, ranks=() if rank is None else (rank,),
        phase=_phase(run, flaw.what, error), quantity=flaw.what, evidence=(_told(flaw.message),),
    )  # fmt: skip
    if flaw.module:
        return replace(found, module=flaw.module)
    if flaw.what == "stale_address":
        return _stale(found, error)
    if flaw.what == "race":
        return _race(found, error)
    if flaw.what in ("hang", "crashed") and (waited := _collective(found, run.outcome.message)):
        return waited
    return _named(found, run, error)


def _named(found: Location, run: RunResult, error: ErrorRecord | None) -> Location:
    """With the module that was at work, or else the first that the words name, and the tensor."""
    if error is None:
        noted = _AT_WORK.search(run.outcome.message)
        return replace(found, module=noted[1]) if noted else found
    if _NO_GROUP.search(error.message):
        told = "its process groups are gone, which no step takes away: something beside the steps"
        return replace(found, evidence=(*found.evidence, told))
    if found.phase == "outside":
        return found
    named = _MODULE.search(error.message)
    module = error.module or (named[1] if named else "")
    starts = [each.start for each in run.ranks if each.start is not None]
    known = {name for start in starts for name in start.tensors.get("weights", ())}
    tensor = next((name for name in _NAME.findall(error.message) if name in known), "")
    raised = (f"it was raised in {error.module}",) if error.module else ()
    return replace(found, module=module, tensor=tensor, evidence=(*found.evidence, *raised))


def _speaker(run: RunResult, culprit: int | None) -> tuple[int | None, ErrorRecord | None]:
    """The rank that failed first, and what it said."""
    records = rank_table(run)
    if culprit is not None and culprit in records:
        return culprit, records[culprit].error
    for rank, each in records.items():
        if each.error is not None and each.error.blames in (None, rank):
            return rank, each.error
    return culprit, None


def _step(
    run: RunResult, known: int | None, rank: int | None, error: ErrorRecord | None
) -> int | None:
    """The step that it was in: as it said, else the first whose record is not where it belongs."""
    if known is not None:
        return known
    if error is not None:
        return error.step if error.step >= 0 else None
    records = rank_table(run).get(rank) if rank is not None else None
    if records is None or records.start is None:
        return None
    places: dict[int, list[int]] = {}
    for place, record in enumerate(records.steps):
        places.setdefault(record.step, []).append(place)
    # A record that does not decode leaves a hole, one may stand twice, or after that of the next
    # step; a rank that died leaves off.
    first = next(step for step in range(len(places) + 1) if places.get(step) != [step])
    steps = run.spec.config.get("steps")
    return first if isinstance(steps, int) and first < steps else None


def _phase(run: RunResult, what: What, error: ErrorRecord | None) -> Phase:
    if what in AT_CAPTURE:
        return "capture"
    if what in LOST:
        return "outside"
    if error is None:
        # It left no word; what it noted, or those that waited for it, say what all were doing.
        others = (each.error for each in run.ranks if each.error is not None)
        at_capture = any(_IN_CAPTURE.search(other.traceback) for other in others)
        return "capture" if at_capture or _AT_WORK.search(run.outcome.message) else "outside"
    return "outside" if _NO_GROUP.search(error.message) else _phase_of_frames(run, error)


def _phase_of_frames(run: RunResult, error: ErrorRecord) -> Phase:
    # A capture calls everything that a step calls.
    if _IN_CAPTURE.search(error.traceback):
        return "capture"
    inside = next((phase for place, phase in _WHERE if place.search(error.traceback)), None)
    config = run.spec.config
    if inside and config.get("graph") and error.step == config.get("graph_warmup_steps"):
        return "capture"  # no step failed before it, and what captures leave behind is new in it
    return inside or "outside"


def _stale(found: Location, error: ErrorRecord | None) -> Location:
    if error is None:
        return found
    match = _STALE.match(error.message.partition("\n")[0])
    name = match[1] if match else ""
    told = f"a graph was captured over {name}, which has moved or gone since"
    return replace(
        found, phase="state", tensor=name, module=module_of(name),
        evidence=(*found.evidence, told),
    )  # fmt: skip


def _race(found: Location, error: ErrorRecord | None) -> Location:
    match = _RACE.match(error.message.partition("\n")[0]) if error is not None else None
    if match is None:
        return found
    tensor, later, earlier = match[1], match[2], match[4]
    streams = _STREAM.findall(f"{later} {earlier}")
    phase: Phase = "forward"
    if any("reduce" in stream for stream in streams) or "grad" in tensor:
        phase = "reduce"
    unit = tensor.rpartition(" of unit ")[2] if " of unit " in tensor else tensor.split(" ")[0]
    module = unit if unit.startswith("layers.") else module_of(tensor)
    if unit == "root" and phase == "forward":
        module = "embedding"  # the first of the root's modules
    near: Near = "after" if any("gather" in s or "reduce" in s for s in streams) else ""
    collective = ""
    if near:
        collective = "reduce-scatter of gradients" if phase == "reduce" else "all-gather of weights"
    told = (f"later: {later}", f"earlier: {earlier}", "no wait says which of the two comes first")
    return replace(
        found, phase=phase, tensor=tensor, module=module, near=near, collective=collective,
        evidence=(f"the memory of {tensor} is used twice", *told),
    )  # fmt: skip


def _collective(found: Location, message: str) -> Location | None:
    """The collective that ranks wait in for each other, as the engine found it out."""
    if match := _NEVER.match(message):
        told = "the others wait in it; the ranks that are missing wait in no collective at all"
        return _waiting(found, match, told, near="before", phase=None)
    if match := _ENTERED.match(message):
        whose = f" of {match['whose']}" if match["whose"] else ""
        told = f"ranks {match['others'].strip()} are in {match['expected']}{whose}"
        phase: Phase = "reduce" if "reduce" in match["expected"] else "forward"
        return _waiting(found, match, told, near="in", phase=phase)
    return None


def _waiting(
    found: Location, match: re.Match[str], told: str, *, near: Near, phase: Phase | None
) -> Location:
    ranks = tuple(int(rank) for rank in match["ranks"].split(","))
    label = match["label"] or ""
    step = match["step"]
    if " in a capture" in match[0]:
        phase = "capture"
        told += "; some capture graphs there, others do not, or are further"
    return replace(
        found, rank=ranks[0], ranks=ranks, near=near, phase=phase or found.phase,
        module=label if label.startswith("layers.") else "",
        step=int(step) if step else found.step,
        collective=match["operator"] + (f" of {label}" if label else ""),
        evidence=(*found.evidence, told),
    )  # fmt: skip


def _told(message: str) -> str:
    text = one_line(message)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
