"""Scenario-matrix runner: proves that graphed and eager training agree bit for bit."""
