"""Graphs of a training step: capture, replay, what they read, and digests of what they wrote.

How these work is in docs/ARCHITECTURE.md.
"""
