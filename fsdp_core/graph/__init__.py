"""Graphs of a training step: capture, replay, what they read, and proof of what they wrote.

    host, cuda, recorder     the two makers, and what watches a capture
    capture                  GraphMaker; one graph of a whole function
    segment, slot            functions of tensors as pairs of graphs, joined to autograd
    hooks                    hooks off a subtree and back, and what they do around captures
    callables, te_callables  graphed modules, by us and by TransformerEngine; capture_order
    capture_session, undo    all ranks or none, and everything as it was
    bank                     several sets of graphs of one thing
    ledger, places           addresses that graphs rely on, and their names
    taps, digest             what went through modules, and digests of it

How these work is in DESIGN.md beside this package.
"""
