"""What would change how tests run without a word: groups that are lost, limits in seconds."""

import pytest
from hypothesis import HealthCheck, settings


@pytest.mark.xdist_group("arch")
def test_groups_of_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """Where tests are shared out by groups, a test says its group in its id, as xdist needs it."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@arch")


def test_no_example_has_a_limit_in_seconds() -> None:
    """Hypothesis asks nothing of the speed of the machine."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
