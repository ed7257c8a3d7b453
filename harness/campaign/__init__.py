"""Measure the checks: plant faults of the catalogue, and clean cases, and score every answer."""
