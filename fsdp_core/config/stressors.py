"""Stressors by name: what leaves a right program's bits alone and breaks a wrong one.

jitter      streams (CUDA) and ranks run early and late
poison      what buffer pools hand out and take back is filled with NaN
scramble    free memory moves between steps, and is filled with NaN
races       accesses to memory that no wait orders are reported; on the CPU only
"""

from typing import Protocol

from fsdp_core.config.rule import ConfigError, Rule

STRESSORS = ("jitter", "poison", "scramble", "races")
NO_STRESS = "none"


class Stressed(Protocol):
    """What the rules of stressors look at: `TrainConfig` is one."""

    @property
    def stress(self) -> tuple[str, ...]:
        """Names; empty means none."""


def _stressors_are_known(run: Stressed) -> ConfigError | None:
    for name in run.stress:
        if name not in STRESSORS:
            return ConfigError("stress", expected="stressors", got=name, legal=STRESSORS)
    return None


def _stressors_differ(run: Stressed) -> ConfigError | None:
    if len(set(run.stress)) == len(run.stress):
        return None
    return ConfigError("stress", expected="each stressor once", got=list(run.stress))


STRESS_RULES: tuple[Rule[Stressed], ...] = (
    Rule("stressors_are_known", "A stressor is one of the names above.", _stressors_are_known),
    Rule("stressors_differ", "No stressor is named twice.", _stressors_differ),
)
