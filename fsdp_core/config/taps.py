"""What a run looks into: patterns of module names, and what of them.

    layers.*.attn:output       output of every attention branch
    layers.0.**:gradient       gradient of the output of everything in layer 0
    norm                       the same as norm:output

`*` stands for one part of a dotted name, `**` for any number of them.
"""

import re
from typing import NamedTuple, Protocol

from fsdp_core.config.rule import ConfigError, Rule

TAP_KINDS = ("input", "output", "gradient")
_PATTERN = re.compile(r"[\w*]+(\.[\w*]+)*")
_WILD = re.compile(r"\*\*|\*")


class Tapped(Protocol):
    """What the rules of taps look at: `TrainConfig` is one."""

    @property
    def taps(self) -> tuple[str, ...]:
        """Patterns; empty means that nothing is looked into."""


class TapPattern(NamedTuple):
    """A pattern of module names, and `input`, `output` or `gradient`."""

    modules: str
    kind: str

    def matches(self, name: str) -> bool:
        """Whether a module of that dotted name is meant."""
        parts = _WILD.sub(lambda found: ".*" if found[0] == "**" else "[^.]*", _escaped(self))
        return re.fullmatch(parts, name) is not None


def _escaped(pattern: TapPattern) -> str:
    return pattern.modules.replace(".", r"\.")


def tap_pattern(text: str) -> TapPattern:
    """What an entry of `taps` means.

    Raises:
        ConfigError: it is no pattern, or asks for what there is none of.
    """
    modules, _, kind = text.partition(":")
    if not _PATTERN.fullmatch(modules):
        expected = "a module's dotted name, with * for one part of it and ** for any"
        raise ConfigError("taps", expected=expected, got=text)
    if kind not in ("", *TAP_KINDS) or text.endswith(":"):
        expected = "input, output or gradient after the colon"
        raise ConfigError("taps", expected=expected, got=text, legal=TAP_KINDS)
    return TapPattern(modules, kind or "output")


def _taps_are_patterns(run: Tapped) -> ConfigError | None:
    for text in run.taps:
        try:
            tap_pattern(text)
        except ConfigError as error:
            return error
    return None


def _taps_differ(run: Tapped) -> ConfigError | None:
    whole = [text if ":" in text else f"{text}:output" for text in run.taps]
    if len(set(whole)) == len(whole):
        return None
    return ConfigError("taps", expected="each pattern once", got=list(run.taps))


TAP_RULES: tuple[Rule[Tapped], ...] = (
    Rule("taps_are_patterns", "A tap is a pattern of module names and what of them.",
         _taps_are_patterns),
    Rule("taps_differ", "No tap is asked for twice.", _taps_differ),
)  # fmt: skip
