"""Calibration of searches and of the check of memory: what they find, and at what cost."""
