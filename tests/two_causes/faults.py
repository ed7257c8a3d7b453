"""Cases whose candidate has two causes, or one that fires now and then, among innocent changes."""

import dataclasses
from dataclasses import dataclass

from fsdp_core.config import FsdpConfig, ParallelConfig, TrainConfig
from harness.bisect.differences import RunChanges
from harness.records import CaseSpec, PlantSpec, RunSpec, joined

STEP, STEPS = 3, 5
FLAKY = 0.3


@dataclass(frozen=True, kw_only=True)
class TwoCauses:
    """One case, and what must be found.

    Attributes:
        name: for the table.
        plants: in the candidate.
        causes: each a set of words, one for each change of the cause: the fault, scope or stressor.
        graph, stress: of the candidate.
        dp: ranks.
    """

    name: str
    plants: tuple[PlantSpec, ...]
    causes: tuple[frozenset[str], ...]
    graph: tuple[str, ...] = ("attn", "mlp")
    stress: tuple[str, ...] = ("jitter", "poison")
    dp: int = 1

    @property
    def slug(self) -> str:
        """The name as a file may have it."""
        return "".join(c if c.isalnum() else "_" for c in self.name)

    def case(self) -> CaseSpec:
        """Runs that differ in the causes and in half a dozen changes that do nothing."""
        plain = TrainConfig(
            parallel=ParallelConfig(dp=self.dp), steps=STEPS, microbatches=2, dtype="fp32"
        )
        wide = dataclasses.replace(
            plain, graph=self.graph, stress=self.stress, stress_seed=7, flush_every=2,
            graph_warmup_steps=1, fsdp=FsdpConfig(pool="traced", reshard_after_forward=False),
        )  # fmt: skip
        reference, candidate = (
            RunSpec(config=config.to_dict(), device="cpu", world_size=self.dp, timeout_s=600.0)
            for config in (plain, wide)
        )
        return CaseSpec(
            id=self.slug, scenario="two_causes", labels={},
            reference=reference, control=dataclasses.replace(reference, replica=1),
            candidate=dataclasses.replace(candidate, plant=joined(self.plants)),
            expect="bitwise", checks={"loss": {}, "state": {}, "finite": {}},
        )  # fmt: skip

    def is_right(self, found: frozenset[frozenset[str]]) -> bool:
        """Whether just the causes were found, told by the names of their changes."""
        case = self.case()
        names = RunChanges(case.reference, case.candidate).names
        wanted = {
            frozenset(next(n for n in names if word in n.split()) for word in cause)
            for cause in self.causes
        }
        return found == wanted


def _plant(fault: str, chance: float = 1.0, step: int = STEP) -> PlantSpec:
    return PlantSpec(fault=fault, step=step, chance=chance)


def _causes(*causes: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(cause.split()) for cause in causes)


TWO_CAUSES = (
    TwoCauses(name="ulp, nan", plants=(_plant("ulp"), _plant("nan")), causes=_causes("ulp", "nan")),
    TwoCauses(name="ulp, drop_step", plants=(_plant("ulp"), _plant("drop_step")),
              causes=_causes("ulp", "drop_step")),
    TwoCauses(name="raise, nan", plants=(_plant("raise", step=4), _plant("nan")),
              causes=_causes("raise", "nan")),
    TwoCauses(name="ulp, stale_parameter+attn", plants=(_plant("ulp"), _plant("stale_parameter")),
              graph=("attn",), causes=_causes("ulp", "stale_parameter attn")),
    TwoCauses(name="ulp, capture_raise+attn",
              plants=(_plant("ulp"), PlantSpec(fault="capture_raise")),
              causes=_causes("ulp", "capture_raise attn")),
    TwoCauses(name="unstable_buffers+attn", plants=(_plant("unstable_buffers", step=0),),
              graph=("attn",), causes=_causes("unstable_buffers attn")),
    TwoCauses(name="skip_graphs+attn, skip_graphs+mlp", plants=(PlantSpec(fault="skip_graphs"),),
              causes=_causes("skip_graphs attn", "skip_graphs mlp")),
    TwoCauses(name="gather_ignores_writes+races", stress=("jitter", "races"), dp=2,
              plants=(_plant("gather_ignores_writes"),),
              causes=_causes("gather_ignores_writes races")),
    TwoCauses(name="reduction_freed_early+races, ulp", stress=("jitter", "races"), dp=2,
              plants=(_plant("reduction_freed_early"), _plant("ulp")),
              causes=_causes("reduction_freed_early races", "ulp")),
    TwoCauses(name="early_release+poison", plants=(_plant("early_release"),), dp=2,
              causes=_causes("early_release poison")),
)  # fmt: skip

FLAKY_CAUSES = (
    TwoCauses(name="ulp in 30 %", plants=(_plant("ulp", FLAKY),), causes=_causes("ulp")),
    TwoCauses(name="nan in 30 %", plants=(_plant("nan", FLAKY),), causes=_causes("nan")),
    TwoCauses(name="drop_step in 30 %", plants=(_plant("drop_step", FLAKY),),
              causes=_causes("drop_step")),
    TwoCauses(name="stale_parameter+attn in 30 %", plants=(_plant("stale_parameter", FLAKY),),
              causes=_causes("stale_parameter attn"), graph=("attn",)),
    TwoCauses(name="raise in 30 %, innocent graphs", plants=(_plant("raise", FLAKY),),
              causes=_causes("raise")),
)  # fmt: skip
