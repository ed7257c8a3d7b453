"""Writes run folders without running anything: records that agree, or not, and the real checks."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.checks import judge
from harness.records import (
    DIGEST_GROUPS,
    CaseSpec,
    FloatBits,
    RankExit,
    RunSpec,
    StepRecord,
    dumps,
)
from harness.store import RunFolder, begin_run, save_outcome
from tests.support import records
from tests.support.run_records import Lab, f32

TENSORS = {
    "samples": ("tokens",),
    "grads": tuple(f"layers.{i}.attn.qkv.weight" for i in range(4)),
    "weights": tuple(f"layers.{i}.attn.qkv.weight" for i in range(4)),
    "optim": tuple(f"layers.{i}.attn.qkv.weight.exp_avg" for i in range(4)),
    "rng": ("cpu",),
}
SCENARIO = """\
name: fsdp_cudagraph_alignment
why: Graphing must not change one bit of the loss under FSDP.
axes: {parallel: [{dp: 1}, {dp: 2}], graph: [eager, [attn], [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
"""
HOSTILE = (
    "<script>alert(1)</script> ]]> \x00 \x1b[31mred\x1b[0m | `tick` ``` @everyone "
    "https://example.org/x \ud800 \u202eright-to-left \x07 </pre></footer> "
    "$\\frac{1}$ {{ 7*7 }} & é 漢"
)
STEPS = 20
Edit = Callable[[StepRecord], StepRecord | None]
ENVIRONMENT = {
    "python": "3.11.7", "torch": "2.12.0", "device": "cpu", "threads": 1,
    "corpus": "sha256:2f1c9a", "deterministic": True,
}  # fmt: skip


def ulp(value: FloatBits | None, distance: int) -> FloatBits:
    assert value is not None
    return FloatBits.from_bits(int(value.bits, 16) + distance)


def same(record: StepRecord) -> StepRecord:
    return record


@dataclasses.dataclass
class Writer:
    """Writes one run folder: cases first, then runs, then verdicts."""

    path: Path
    scenario: str = SCENARIO
    steps: int = STEPS
    wall_s: float = 1.25
    created: str = "2031-02-03T04:05:06+00:00"
    cases: list[CaseSpec] = dataclasses.field(default_factory=list)
    runs: list[tuple[RunSpec, dict[str, Any]]] = dataclasses.field(default_factory=list)
    unjudged: set[str] = dataclasses.field(default_factory=set)

    def add(self, case_id: str, world_size: int, graph: str, **changes: Any) -> None:
        """Plan a case; `reference`, `control`, `candidate` say how that run is not whole."""
        skipped: str = changes.get("skip_reason", "")
        legs: dict[str, Any] = {}
        for leg, replica, scopes in (
            ("reference", 0, []), ("control", 1, []), ("candidate", 0, graph.split("+")),
        ):  # fmt: skip
            config = {
                "steps": self.steps, "microbatches": 2, "graph": scopes, "seed": len(self.cases),
                "parallel": {"dp": world_size},
            }  # fmt: skip
            legs[leg] = records.run_spec(
                world_size, config=config, timeout_s=300.0, replica=replica
            )
            if not skipped:
                self.runs.append((legs[leg], changes.get(leg, {})))
        self.cases.append(records.case_spec(
            case_id, **legs, scenario=changes.get("scenario", "fsdp_cudagraph_alignment"),
            labels=changes.get("labels", {"parallel": f"dp{world_size}", "graph": graph}),
            skip_reason=skipped,
            checks={"loss": {}, "state": {}, "finite": {}, "peak_memory": {"max_ratio": 2.0}},
        ))  # fmt: skip
        if changes.get("unjudged"):
            self.unjudged.add(case_id)

    def write(self) -> Path:
        """Write it all and return the folder."""
        manifest = {
            "scenario": self.cases[0].scenario if self.cases else "fsdp_cudagraph_alignment",
            "created": self.created,
            "command": ["harness", "run", "scenarios/smoke.yaml::fsdp_cudagraph_alignment"],
        }
        with RunFolder.create(self.path, manifest, self.scenario, self.cases) as folder:
            for spec, changes in self.runs:
                self._run(folder.run_folder(spec.key), spec, **changes)
            for case in self.cases:
                if case.id not in self.unjudged:
                    folder.seal_case(case)
                    specs = (case.reference, case.control, case.candidate)
                    legs = [folder.load_run(spec) for spec in specs]
                    folder.save_verdict(
                        dataclasses.replace(judge(case, *legs), wall_s=self.wall_s), case
                    )
        return self.path

    def _run(
        self, path: Path, spec: RunSpec, *, edit: Edit = same, what: str = "", message: str = "",
        culprit: int | None = None, peak: int = 40 << 20, stop: int | None = None,
        printed: str = "", environment: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        begin_run(path, spec)
        lab = Lab(self.steps, spec.world_size, tensors=TENSORS, taps={})
        for rank in range(spec.world_size):
            made = lab.rank(rank, spec)
            assert made.start is not None
            assert made.end is not None
            fingerprint = {"fingerprint": ENVIRONMENT | (environment or {})}
            start = dataclasses.replace(made.start, environment=fingerprint)
            own = peak + rank * 4096
            steps = (edit(_step(step, own)) for step in made.steps[:stop])
            end = dataclasses.replace(made.end, peak_bytes=own) if stop is None else None
            lines = [dumps(each) for each in (start, made.initial, *steps, end) if each is not None]
            (path / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
            said = printed.encode("utf-8", "surrogatepass") if rank == (culprit or 0) else b""
            (path / f"rank{rank}.stderr").write_bytes(said)
        exits = [RankExit(rank=r, code=-9 if what and r == culprit else 0)
                 for r in range(spec.world_size)]  # fmt: skip
        save_outcome(path, records.outcome(
            spec.key, what=what, message=message, culprit_rank=culprit, ranks=tuple(exits),
            wall_s=self.wall_s,
        ))  # fmt: skip


def _step(record: StepRecord, peak: int) -> StepRecord:
    step, rank = record.step, record.rank
    micro = tuple(
        f32(1.5 + 4.0 * math.exp(-step / 6) + 0.05 * math.sin(3 * step + rank + 2 * m))
        for m in range(2)
    )
    return dataclasses.replace(
        record, loss=micro[0], microbatch_losses=micro, grad_norm=f32(1.0 / (1 + step)),
        live_bytes=peak // 2, peak_bytes=peak,
    )  # fmt: skip


def drift(record: StepRecord) -> StepRecord:
    """One ulp on a weight of the last rank at step 7, that reaches the loss at step 9."""
    digests = dict(record.digests)
    if record.rank == 1 and record.step >= 7:
        for group in ("weights", "optim") if record.step == 7 else DIGEST_GROUPS[:3]:
            text = digests[group]
            digests[group] = text[:64] + f"{int(text[64:96], 16) ^ 1:032x}" + text[96:]
    distance = 0 if record.step < 9 else (record.step - 8) ** 2
    return dataclasses.replace(record, digests=digests, loss=ulp(record.loss, distance))


def nan_at_12(record: StepRecord) -> StepRecord:
    if record.step < 12:
        return record
    return dataclasses.replace(
        record, loss=FloatBits.from_bits(0x7FC00000),
        nonfinite={"grads": ("layers.2.attn.qkv.weight",)} if record.rank else {},
    )  # fmt: skip


def negative_zero(record: StepRecord) -> StepRecord:
    zero = 0x80000000 if record.step == 5 and record.rank == 0 else 0
    return dataclasses.replace(record, loss=FloatBits.from_bits(zero))


def positive_zero(record: StepRecord) -> StepRecord:
    return dataclasses.replace(record, loss=FloatBits.from_bits(0))


def without_step_4(record: StepRecord) -> StepRecord | None:
    return None if record.step == 4 and record.rank == 1 else record


def add_everything(writer: Writer) -> Writer:
    """Passes, every kind of failure, errors, incomparables, a skip, and a case not judged."""
    add = writer.add
    add("dp1-attn", 1, "attn")
    add("dp1-full_iteration", 1, "full_iteration")
    add("dp2-attn", 2, "attn", candidate={"edit": drift})
    add("dp2-full_iteration", 2, "full_iteration", candidate={"edit": nan_at_12})
    add("dp3-attn", 3, "attn", candidate={
        "what": "hang", "message": f"rank 1 did not finish within 300 s; {HOSTILE}", "culprit": 1,
        "stop": 9,
        "printed": "line\n" * 50 + "x" * 1_000_000 + f"\n{HOSTILE}\nlast line\n",
    })  # fmt: skip
    add("dp3-full_iteration", 3, "full_iteration", candidate={"peak": 100 << 20})
    add("dp4-attn", 4, "attn", candidate={"edit": without_step_4})
    add("dp4-full_iteration", 4, "full_iteration", control={"edit": drift})
    add("dp5-attn", 5, "attn", reference={
        "what": "oom", "message": "rank 0 ran out of memory", "culprit": 0, "stop": 3,
        "printed": "OutOfMemoryError: tried to allocate 2 GiB\n",
    })  # fmt: skip
    add("dp5-full_iteration", 5, "full_iteration", candidate={"environment": {"torch": "2.13.0"}})
    add("dp6-attn", 6, "attn", skip_reason="needs 6 GPUs, this machine has 0")
    add("dp6-full_iteration", 6, "full_iteration", unjudged=True)
    add("dp7-attn", 1, "attn", labels={"parallel": "dp7", "graph": HOSTILE},
        reference={"edit": positive_zero}, control={"edit": positive_zero},
        candidate={"edit": negative_zero})  # fmt: skip
    return writer
