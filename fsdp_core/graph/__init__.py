"""Graphs of a training step: capture, replay, what they read, and proof of what they wrote."""
