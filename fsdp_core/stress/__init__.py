"""Stressors: they leave a right program's bits alone, and make a wrong one fail each time."""
