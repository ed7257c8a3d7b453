"""Scenarios: YAML to decoded files to cases, suites of several, selections and shards."""
