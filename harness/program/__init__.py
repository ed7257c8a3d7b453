"""Somebody's script, module or function: its specification, packages, and one rank of it.

Its seam to the harness is its rank's file of records, which `harness.recorder` writes in it.
"""
