"""Scenario files under pytest: each case an item, all of them on the slots of one engine.

plugin    options; loads the rest only where it is asked for
session   pytest's hooks: files collected, cases announced, the service ended
items     a scenario file and its cases as pytest sees them
narrowing what -m and -k leave of them, known before pytest sees them
sockets   how workers of pytest-xdist reach the service of their controller
service   from a case to its answer: run folders, one execution a case
pool      one engine for many executions: runs made once, slots never given twice
"""
