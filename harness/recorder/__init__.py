"""Observes a training program that was not written for the harness."""
