"""Scenario files under pytest: each case an item, all of them carried out by one `harness run`."""
