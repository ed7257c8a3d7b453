"""Parallel layouts: what a rank knows of its axes, and the modules that are cut along them."""
