"""Records and plans of runs: a test gives what it asks about, the rest is plain."""

from typing import Any

from harness.records import (
    SCHEMA_VERSION,
    CaseSpec,
    EndRecord,
    ErrorRecord,
    FloatBits,
    RankRecords,
    RunOutcome,
    RunSpec,
    StartRecord,
    StepRecord,
    Verdict,
)
from harness.store.contents import KeptTensor

ONE = FloatBits.from_bits(0x3F800000)


def run_spec(world_size: int = 1, **fields: Any) -> RunSpec:
    """A run on the CPU."""
    given: dict[str, Any] = {"config": {}, "device": "cpu", "timeout_s": 1.0} | fields
    return RunSpec(world_size=world_size, **given)


def case_spec(
    case_id: str, reference: RunSpec, control: RunSpec, candidate: RunSpec, **fields: Any
) -> CaseSpec:
    """A case of three runs, compared bit for bit."""
    given: dict[str, Any] = {"scenario": "s", "labels": {}, "expect": "bitwise", "checks": {}}
    return CaseSpec(
        id=case_id, reference=reference, control=control, candidate=candidate, **(given | fields)
    )


def outcome(key: str = "k", **fields: Any) -> RunOutcome:
    """How a run has ended: well, if nothing else is given."""
    given: dict[str, Any] = {"what": "", "message": "", "culprit_rank": None, "ranks": ()}
    return RunOutcome(key=key, **(given | {"started_unix_s": 0.0, "wall_s": 1.0} | fields))


def verdict(case_id: str = "one", **fields: Any) -> Verdict:
    """A pass."""
    given: dict[str, Any] = {"outcome": "passed", "what": "", "message": "m", "checks": ()}
    return Verdict(case_id=case_id, **(given | {"runs": {}, "wall_s": 0.0} | fields))


def start(rank: int = 0, **fields: Any) -> StartRecord:
    """The first record of a rank of two."""
    given: dict[str, Any] = {"schema": SCHEMA_VERSION, "world_size": 2, "pid": 1, "device": "cpu"}
    return StartRecord(rank=rank, **(given | {"tensors": {}, "environment": {}} | fields))


def step(number: int, rank: int = 0, **fields: Any) -> StepRecord:
    """A step without digests, whose loss is 1."""
    given: dict[str, Any] = {
        "loss": ONE, "microbatch_losses": (ONE,), "grad_norm": ONE, "digests": {}, "nonfinite": {},
        "step_s": 0.0, "live_bytes": 1, "peak_bytes": 1,
    }  # fmt: skip
    return StepRecord(step=number, rank=rank, **(given | fields))


def end(rank: int = 0, **fields: Any) -> EndRecord:
    """The end of a rank of two steps."""
    given: dict[str, Any] = {"steps": 2, "peak_bytes": 1, "startup_s": 0.1, "wall_s": 1.0}
    return EndRecord(rank=rank, **(given | fields))


def error(rank: int = 0, **fields: Any) -> ErrorRecord:
    """An exception that ended a rank in step 1."""
    given: dict[str, Any] = {"step": 1, "what": "crashed", "type": "E", "message": "m"}
    return ErrorRecord(rank=rank, **(given | {"traceback": "t"} | fields))


def kept_tensor(name: str, shape: tuple[int, ...], **fields: Any) -> KeptTensor:
    """What a rank says of a tensor that it keeps."""
    given: dict[str, Any] = {"part": 0, "dtype": "float32", "as_digested": True}
    return KeptTensor(name=name, shape=shape, **(given | fields))


def rank_records(rank: int = 0, **fields: Any) -> RankRecords:
    """What is known of a rank: nothing, but for what is given."""
    given: dict[str, Any] = dict.fromkeys(("steps", "events", "problems"), ())
    given |= dict.fromkeys(("start", "error", "end"))
    return RankRecords(rank=rank, **(given | fields))
