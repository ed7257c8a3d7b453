"""Scenario files under pytest: each case an item, all of them carried out by one `harness run`.

plugin      options; loads the rest only where it is wanted
session     pytest's hooks: the selected cases carried out, workers of xdist, the end
collection  a scenario file and its cases as pytest sees them; what -m and -k leave of them
"""
