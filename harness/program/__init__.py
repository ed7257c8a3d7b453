"""Programs under test: the built-in trainer, or anybody's script, module or function.

    spec      what a scenario says of a program, as a run's specification holds it
    packages  environments for package versions that a scenario asks for
    launch    one rank of a script, a module or a function, with the recorder in it

The seam between the harness and a program is its rank's file of records (`harness.records`): the
built-in trainer writes it in `harness.worker`, any other program has `harness.recorder` in it.
What the harness may ask of a program beyond that is in `harness.program.spec.Capabilities`.
"""
