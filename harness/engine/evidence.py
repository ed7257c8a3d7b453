"""Where ranks were when a run died or hung, and whom they waited for.

    rank<R>.place    what a rank notes as it goes (`harness.recorder.PlaceFile`)
    rank<R>.answer   the same of a rank of a program that is asked by the pipe rank<R>.ask
                     (`harness.recorder.collectives`): with what C++ called, and from where
    nccl_rank<R>     NCCL's flight recorder, of soaks and programs on GPUs, written by the watchdog
                     thread, asked by the pipe nccl_rank<R>.pipe. Replays of graphs enqueue nothing
                     that it records: a rank that waits in one shows the collectives before it
    cuda<R>.core     CUDA's light core dump, registers and the kernel, of soaks: a program may mean
                     to catch its error

Of two ranks of one group the one that entered fewer collectives is the one that the other waits
for; at fault are those that wait in no other collective themselves. Ranks that have entered equally
many, but are in different ones, wait in vain: one has called another collective, or left one out.
So do ranks of several groups that wait for each other in a circle. Of two sides with equally many
ranks the one whose collectives are not those of earlier steps is at fault.
"""

import ast
import errno
import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from harness.recorder import PLACE_BYTES
from harness.records import CollectiveFault, Entered, RunSpec
from harness.store.files import read_plain, read_tail
from harness.values import Json, RecordError

MAX_DUMP_BYTES = 256 << 20
TAIL_BYTES = 64 << 10
DUMP_S = 5.0
"""Given to NCCL's watchdogs, which look for requests once a second, and write."""
ANSWER_S = 8.0
"""Given to a program's ranks to say where they are; less once all have said it."""
IN_CAPTURE = "a capture"
"""Label of collectives that belong to no unit and are called while graphs are captured."""
_OF_NCCL = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    **dict.fromkeys(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE",
                     "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"), "{folder}/nccl_rank"),
}  # fmt: skip
_OF_CUDA = {
    **dict.fromkeys(("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
                     "CUDA_COREDUMP_SHOW_PROGRESS"), "1"),
    "CUDA_COREDUMP_FILE": "{folder}/cuda{rank}.core",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,"
    "skip_shared_memory,skip_local_memory,skip_constbank_memory,skip_abort",
}  # fmt: skip
_NOT_UNDERSTOOD = (
    OSError, EOFError, pickle.UnpicklingError, ValueError, SyntaxError, LookupError, TypeError,
    AttributeError,
)  # fmt: skip
"""What comes of a dump that is damaged, or of another version."""
_NOT_OF_PROGRAM = re.compile(r"/(site|dist)-packages/torch/|/harness/recorder/|^<|^\?\?")
"""Files that every program's stack goes through."""
_EXCEPTION = re.compile(r"coredump: Detected an exception of type (\w+)")
_FRAME = re.compile(r"coredump:\s+#\d+\s+0x[0-9a-f]+\s+(\S.*)")
"""Of the stack of the warp that failed, innermost first: the last one is the kernel."""


# --- what a rank notes ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recorded(Json):
    """A collective that a rank has entered, over or not; what is not known is "", a step -1."""

    key: str  # of its group, as `group_key`
    number: int  # of the group's collectives
    operator: str  # as torch calls it
    step: int = -1
    sizes: str = ""  # of tensors, where all ranks must have the same
    called_at: str = ""  # train.py:7 in main
    label: str = ""  # whose it is
    how: str = ""  # what follows the sizes: its root, where it has one
    is_new: bool = False  # steps before had another one here, or earlier

    @property
    def group(self) -> tuple[int, ...]:
        ranks = self.key.partition(" ")[0]
        return tuple(map(int, ranks.split(","))) if ranks else ()

    @property
    def as_entered(self) -> Entered:
        in_capture = self.label == IN_CAPTURE
        return Entered(
            operator=self.operator.rpartition("::")[2].strip("_"),
            label="" if in_capture else self.label, in_capture=in_capture,
            sizes=self.sizes + self.how, called_at=self.called_at,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Place(Json):
    """Where a rank is, first the collective that it entered last; unknown as in `Recorded`."""

    step: int
    operator: str
    label: str
    group: tuple[int, ...]  # global ranks
    is_inside: bool  # still
    entered: dict[str, int] = field(default_factory=dict)  # how many of each group
    module: str = ""  # the innermost of the step that captures graphs
    name: str = ""  # of the group, "" if it is the one of all ranks
    sizes: str = ""
    called_at: str = ""
    phase: str = ""  # forward, ...
    at: str = ""  # the line of the program
    message: str = ""  # between two ranks, that it waits for; then it is in no collective
    peer: int = -1  # whose, or to whom
    how: str = ""  # as in `Recorded`
    recent: tuple[Recorded, ...] = ()  # the last ones by torch's flight recorder
    is_new: bool = False  # as in `Recorded`

    @property
    def last(self) -> Recorded:
        key = group_key(self.group, self.name)
        return Recorded(
            key=key, number=self.entered.get(key, 0), operator=self.operator, step=self.step,
            sizes=self.sizes, called_at=self.called_at, label=self.label,
            how=self.how, is_new=self.is_new,
        )  # fmt: skip

    @property
    def waits_in(self) -> Entered:
        if self.message:
            return Entered(operator=self.message, called_at=self.at)
        return self.last.as_entered

    @property
    def wait(self) -> str:
        here, step = self.waits_in, f" in step {self.step}" if self.step >= 0 else ""
        ranks, at = group_key(self.group), here.called_at and f"called at {here.called_at}"
        of = "" if self.message else f"collective {self.last.number} of ranks {ranks}"
        told = ", ".join(filter(None, (of, at)))
        return f"{here}{step}" + (f" ({told})" if told else "")

    def lacks(self, call: Recorded) -> bool:
        return self.entered.get(call.key, 0) < call.number


def group_key(ranks: tuple[int, ...], name: str = "") -> str:
    """A group of ranks as text, with its name unless it is the one of all ranks."""
    key = ",".join(map(str, ranks))
    return f"{key} {name}" if name else key


def answer_path(folder: Path, rank: int) -> Path:
    """Where a rank of a program writes its place when it is asked."""
    return folder / f"rank{rank}.answer"


def place_path(folder: Path, rank: int) -> Path:
    """Where a rank writes its place."""
    return folder / f"rank{rank}.place"


def read_place(path: Path) -> Place | None:
    """Where a rank was last; None if it did not say, or nothing that decodes."""
    try:
        return Place.from_json(json.loads(read_plain(path, PLACE_BYTES).partition(b"\n")[0]))
    except (OSError, ValueError, RecordError, RecursionError):
        return None


# --- what a leader asks for -------------------------------------------------------------------


def evidence_environment(
    spec: RunSpec, folder: Path, rank: int, set_already: Mapping[str, str]
) -> dict[str, str]:
    """Variables that make a rank leave evidence, unless the user has set them; none but for soaks
    and programs on GPUs."""
    if spec.device != "cuda" or (spec.is_builtin and spec.soak is None):
        return {}
    wanted, place = _OF_NCCL | (_OF_CUDA if spec.soak is not None else {}), str(folder.absolute())
    return {
        name: value.replace("{rank}", str(rank)).replace("{folder}", place)
        for name, value in wanted.items() if name not in set_already
    }  # fmt: skip


def dumps_take_s(spec: RunSpec) -> float:
    """Seconds that ranks need to answer when they are asked where they are."""
    if evidence_environment(spec, Path(), 0, {}):
        return DUMP_S
    return 0.0 if spec.is_builtin or spec.world_size == 1 else ANSWER_S


def have_answered(spec: RunSpec, folder: Path, ranks: Iterable[int]) -> bool:
    """Whether no more is to come from ranks that were asked where they are."""
    if dumps_take_s(spec) != ANSWER_S:
        return False
    return all(answer_path(folder, rank).exists() for rank in ranks)


def _pipes(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank{rank}.ask", folder / f"nccl_rank{rank}.pipe"


def prepare_to_ask(spec: RunSpec, folder: Path, ranks: Iterable[int]) -> None:
    """Make the pipes at which ranks of a program wait to be asked where they are."""
    for rank in () if spec.is_builtin or spec.world_size == 1 else ranks:
        with suppress(OSError):  # a file system without pipes: such a rank is not asked
            os.mkfifo(_pipes(folder, rank)[0])


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> None:
    """Ask ranks where they are: NCCL's watchdogs and the recorder's threads, if there are any."""
    for path in (path for rank in ranks for path in _pipes(folder, rank)):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                continue  # no pipe, or nobody reads it
            raise
        os.write(fd, b"1\n")
        os.close(fd)


def remove_pipes(folder: Path, ranks: Iterable[int], *, all_went_well: bool) -> None:
    """Take away what ranks were asked by, and of a run that ended well their places, too."""
    for rank in ranks:
        places = (place_path(folder, rank), answer_path(folder, rank)) if all_went_well else ()
        for path in (*_pipes(folder, rank), *places):
            path.unlink(missing_ok=True)


# --- what ranks have left ---------------------------------------------------------------------


def last_place(folder: Path, rank: int) -> Place | None:
    """Where a rank was: by its answer, by NCCL's recorder, or by its own notes; else None."""
    if (answer := read_place(answer_path(folder, rank))) is not None:
        return answer
    own, dump = read_place(place_path(folder, rank)), read_dump(folder / f"nccl_rank{rank}")
    if own is None or dump is None:
        return own or dump
    # NCCL counts no steps and knows no modules.
    step = own.step if own.operator or own.entered else dump.step
    return replace(dump, step=step, entered=own.entered | dump.entered, module=own.module)


class _PlainUnpickler(pickle.Unpickler):
    """Takes apart numbers, texts, lists and mappings; a dump has nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump of plain values")


def read_dump(path: Path) -> Place | None:
    """Where a rank was by NCCL's recorder; None if it says nothing that can be understood."""
    try:
        dump = _PlainUnpickler(io.BytesIO(read_plain(path, MAX_DUMP_BYTES))).load()
        groups = {
            str(config["name"]): tuple(int(rank) for rank in ast.literal_eval(config["ranks"]))
            for config in dump["pg_config"].values()
        }
        entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")]
        return _place(entries, groups) if entries else None
    except _NOT_UNDERSTOOD:
        return None


def _place(entries: list[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]) -> Place:
    """The first collective that is not over, or the last one."""

    def group_of(entry: dict[str, Any]) -> tuple[tuple[int, ...], str]:
        name, description = map(str, entry["process_group"])
        return groups[name], "" if description == "default_pg" else name

    entered: dict[str, int] = {}
    for entry in entries:
        key = group_key(*group_of(entry))
        entered[key] = max(entered.get(key, 0), int(entry["collective_seq_id"]))
    open_ones = [entry for entry in entries if entry["state"] != "completed"]
    at = open_ones[0] if open_ones else entries[-1]
    group, name = group_of(at)
    if open_ones:
        # It waits here, whatever was enqueued after it.
        entered[group_key(group, name)] = int(at["collective_seq_id"])
    frames = ((PurePath(frame["filename"]), frame) for frame in at.get("frames") or [])
    called = (
        f"{path.name}:{int(frame['line'])} in {frame['name']}"
        for path, frame in frames if not _NOT_OF_PROGRAM.search(path.as_posix())
    )  # fmt: skip
    return Place(
        step=-1, operator=str(at["profiling_name"]).rpartition(":")[2], label="", group=group,
        is_inside=bool(open_ones), entered=entered, name=name, called_at=next(called, ""),
    )  # fmt: skip


def kernel_words(stderr_tail: str, folder: Path, rank: int) -> str:
    """What CUDA's core dump says of an illegal access, in words; "" without one."""
    core = folder / f"cuda{rank}.core"
    what = next(iter(_EXCEPTION.findall(stderr_tail)), "an exception")
    if frames := _FRAME.findall(stderr_tail):
        return f"CUDA's core dump says {what} in kernel {frames[-1].strip()}"
    if core.exists():
        command = f"cuda-gdb -ex 'target cudacore {core.name}'"
        return f"CUDA's core dump says {what}; `{command}` names the kernel"
    return ""


def tail_of(path: Path, size_bytes: int = TAIL_BYTES) -> str:
    """The end of a text file; empty if it cannot be read, or is a link or a pipe."""
    return read_tail(path, size_bytes).decode(errors="replace")


# --- who kept whom waiting --------------------------------------------------------------------


def find_missing(places: Mapping[int, Place]) -> CollectiveFault | None:
    """Who never entered a collective that others wait in; None if places do not tell."""
    lacking: dict[int, list[Recorded]] = {}
    for call in (place.last for place in places.values() if place.is_inside):
        for rank in call.group:
            if rank in places and places[rank].lacks(call):
                lacking.setdefault(rank, []).append(call)
    at_fault = [r for r in lacking if not (places[r].is_inside or places[r].message)]
    if not at_fault:
        return None
    # The earliest that is lacking: what comes after it in the same group only follows.
    first = min(lacking[at_fault[0]], key=lambda call: (call.step, call.number))
    late = sorted(r for r in at_fault if r in first.group and places[r].lacks(first))
    return _fault(late, [rank for rank in first.group if rank not in late], first)


def find_mismatch(places: Mapping[int, Place]) -> CollectiveFault | None:
    """Which ranks of a group entered different collectives as their n-th; None if all agree.

    NCCL enqueues, and gloo takes less than was sent: a rank goes on after a collective that is
    wrong, and is found in a later one. So all that ranks recorded counts with what they wait in.
    """
    met: dict[tuple[int, str], dict[int, Recorded]] = {}
    for rank, place in sorted(places.items()):
        last = (place.last,) if place.is_inside and place.group else ()
        for call in (*place.recent, *last):
            met.setdefault((call.number, call.key), {})[rank] = call
    return next(filter(None, (_mismatch(met[at]) for at in sorted(met))), None)


class Chain(NamedTuple):
    """A chain of ranks, each waiting for the next one.

    words: for the message. fault: the first wait of the chain. end: the rank at fault, None if that
    cannot be told: the last one, if it waits for nobody; of a circle over several groups the
    smaller side.
    """

    words: str
    fault: CollectiveFault
    end: int | None


def find_chain(places: Mapping[int, Place]) -> Chain | None:
    """Which rank each rank waits for, in a collective or for a message; None if it is unknown."""
    waits: dict[int, int] = {}
    for rank, place in places.items():
        lacking = (r for r in place.last.group if r in places and places[r].lacks(place.last))
        whom = next(lacking, -1) if place.is_inside else place.peer if place.message else -1
        if whom in places:
            waits[rank] = whom
    # A rank inside a collective that all ranks have entered is about to leave it.
    chains = [chain for start in sorted(waits) if (chain := _chain(start, waits))
              and (chain[-1] in waits or not places[chain[-1]].is_inside)]  # fmt: skip
    if not chains:
        return None
    chain = max(chains, key=lambda ranks: (ranks[-1] not in waits, len(ranks)))
    end = None if chain[-1] in waits else chain[-1]
    if end is None and all(places[rank].is_inside for rank in chain):
        fault = _parted(chain, waits, places)
        return Chain(fault_words(fault), fault, odd_one(fault))
    first, second = chain[:2]
    due, mine = places[first], places[second]
    due_here = due.last if due.is_inside else None
    fault = CollectiveFault(
        ranks=(second,), entered=mine.waits_in if second in waits else None, others=(first,),
        expected=due.waits_in, group=tuple(sorted(chain[:2])) if due_here is None else due.group,
        number=0 if due_here is None else due_here.number, step=due.step if due.step >= 0 else None,
    )  # fmt: skip
    links = (f"rank {r} for rank {waits[r]} in {places[r].wait}" for r in chain if r in waits)
    how = "in a circle" if end is None else f"for rank {end}"
    return Chain(f"ranks wait {how}: {'; '.join(links)}", fault, end)


def _chain(rank: int, waits: Mapping[int, int]) -> list[int]:
    """The ranks from `rank` on, each waiting for the next; if they end in a circle, the circle."""
    chain = [rank]
    while (rank := waits.get(rank, -1)) >= 0 and rank not in chain:
        chain.append(rank)
    return chain[chain.index(rank) :] if rank in chain else chain


def _parted(
    circle: list[int], waits: Mapping[int, int], places: Mapping[int, Place]
) -> CollectiveFault:
    """The smaller side of ranks that wait for each other in collectives of several groups.

    A rank counts only if it could have entered the other side's collective: it is in that group, or
    its own group of the same size has reached the same number.
    """

    def chose(rank: int) -> list[int]:
        due, other = places[rank].last, places[waits[rank]].last
        size, before = len(other.group), other.number - 1
        there = (r for r, place in places.items() if place.is_inside
                 and (place.last.key, place.last.number) == (due.key, due.number))  # fmt: skip
        return [r for r in sorted(there) if r == rank or r in other.group or any(
                    number == before and key.partition(" ")[0].count(",") + 1 == size
                    for key, number in places[r].entered.items())]  # fmt: skip

    first = max(circle, key=lambda rank: len(chose(rank)))
    due, mine = places[first].last, places[waits[first]].last
    odd = [rank for rank in circle if places[rank].lacks(due) and places[rank].last == mine]
    found = _fault(odd, chose(first), due, mine)
    return replace(found, entered=replace(mine.as_entered, group=mine.group))


def _mismatch(calls: Mapping[int, Recorded]) -> CollectiveFault | None:
    """Of ranks that are in the collective of one number of one group."""
    # Whose a collective is, and its sizes, may be unknown: that is no difference.
    known = all(call.label for call in calls.values())
    sized, rooted = (all(getattr(c, n) for c in calls.values()) for n in ("sizes", "how"))
    sides: dict[tuple[str, ...], list[int]] = {}
    for rank, call in calls.items():
        about = (call.label if known else "", call.sizes if sized else "")
        sides.setdefault((call.operator, *about, call.how if rooted else ""), []).append(rank)
    if len(sides) < 2:
        return None

    def weight(ranks: list[int]) -> tuple[int, bool]:
        return len(ranks), not any(calls[rank].is_new for rank in ranks)

    most = max(sides.values(), key=weight)
    fewest = min((ranks for ranks in sides.values() if ranks is not most), key=weight)
    is_new = weight(most)[1] and not weight(fewest)[1]
    return replace(_fault(fewest, most, calls[most[0]], calls[fewest[0]]), is_new=is_new)


def _fault(
    ranks: list[int], others: list[int], expected: Recorded, entered: Recorded | None = None
) -> CollectiveFault:
    return CollectiveFault(
        ranks=tuple(ranks), entered=None if entered is None else entered.as_entered,
        others=tuple(others), expected=expected.as_entered, group=expected.group,
        number=expected.number, step=expected.step if expected.step >= 0 else None,
    )  # fmt: skip


def odd_one(fault: CollectiveFault) -> int | None:
    """The rank at fault, None if it cannot be told which of two sides is."""
    fewer = len(fault.ranks) < len(fault.others)
    is_known = fault.entered is None or fewer or fault.is_new
    return fault.ranks[0] if is_known else None


def fault_words(fault: CollectiveFault) -> str:
    """Why ranks waited in vain, in a sentence."""
    mine, due = fault.entered, fault.expected
    when = "" if fault.step is None else f" in step {fault.step}"
    called = f", called at {due.called_at}" if due.called_at else ""
    words = f"{due}{when} (collective {fault.number} of ranks {group_key(fault.group)}{called})"
    if mine is None:
        return f"{rank_names(fault.ranks)} never entered {words}"
    is_same = mine.operator == due.operator and not mine.group
    differs = is_same and mine.sizes != due.sizes
    more = f" of sizes {mine.sizes}, not {due.sizes}" if differs else ""
    whose = f" (of ranks {group_key(mine.group)})" if mine.group else ""
    more += f", called at {mine.called_at}" if mine.called_at else ""
    others = f"{',' if more else ''} where {rank_names(fault.others)} entered {words}"
    return f"{rank_names(fault.ranks)} entered {mine}{whose}{more}{others}"


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    numbers = list(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
