"""Pictures hold their facts as text, follow the reader's scheme and never break on a label."""

import base64
from typing import Any
from xml.etree import ElementTree as ET

from reports.figures import loss_figure, memory_figure
from reports.loss_curve import LossCurve
from reports.report import LegMemory

NAN = float("nan")


def svg(uri: str) -> str:
    kind, _, data = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(data).decode()


def words(uri: str) -> str:
    return " ".join(ET.fromstring(svg(uri)).itertext())


def curve(**changes: Any) -> LossCurve:
    facts: dict[str, Any] = {
        "rank": 3, "steps": (0, 1), "reference": (2.0, 1.0), "candidate": (2.0, 1.0),
        "delta_steps": (0, 1), "delta_ulps": (0.0, 0.0), "differing": (), "words": "",
    }  # fmt: skip
    return LossCurve(**(facts | changes))


def test_pictures_follow_the_scheme_and_fetch_nothing() -> None:
    """Dark and light are both inside, no stand-in colour is left, and no DTD is named."""
    text = svg(loss_figure(curve()))
    assert "prefers-color-scheme:dark" in text
    assert "var(--ink)" in text
    assert "#01020" not in text
    assert "<!DOCTYPE" not in text
    assert loss_figure(curve()) == loss_figure(curve())


def test_flat_zero_is_said() -> None:
    """A difference of zero is written on the picture, a real one says where it starts."""
    assert "zero at every step" in words(loss_figure(curve()))
    text = words(loss_figure(curve(delta_ulps=(0.0, 1.0), differing=(1,))))
    assert "zero at every step" not in text
    assert "differs first at step 1" in text


def test_distances_of_any_size_are_drawn() -> None:
    """Huge distances, NaN alone, and thousands of steps give a picture with plain numbers."""
    huge = curve(delta_ulps=(0.0, 4e9), differing=(1,))
    assert "mathdefault" not in words(loss_figure(huge))
    nan = curve(reference=(NAN, NAN), candidate=(NAN, 1.0), delta_ulps=(NAN, NAN), differing=(0, 1))
    assert "NaN or infinite" in words(loss_figure(nan))
    many = tuple(range(5000))
    flat = tuple(1.0 for _ in many)
    long = curve(steps=many, reference=flat, candidate=flat, delta_steps=many, delta_ulps=flat)
    assert len(svg(loss_figure(long))) < 400_000


def test_memory_bars_name_legs_and_limit() -> None:
    """A leg has its highest rank in words, an unmeasured leg says so, a far limit is left out."""
    legs = (
        LegMemory(leg="reference", peaks={0: 1 << 20, 1: 2 << 20}),
        LegMemory(leg="candidate", peaks={}),
    )
    text = words(memory_figure(legs, 1.5))
    assert "2.00 MiB" in text
    assert "not recorded" in text
    assert "limit 1.5x" in text
    assert "limit" not in words(memory_figure(legs, 100.0))
    assert "limit" not in words(memory_figure(legs, None))
