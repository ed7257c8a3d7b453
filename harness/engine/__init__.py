"""Engines: they start runs, wait for them and say what happened."""
