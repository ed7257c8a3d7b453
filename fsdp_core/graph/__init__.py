"""Graphs of a training step: capture, replay, what they read, and proof of what they wrote.

    host_graph, cuda_graph, recorder   the two makers, and what watches a capture
    graph                    GraphMaker; one graph of a whole function
    graphed_callable         functions of tensors as pairs of graphs, joined to autograd
    library_graphs           the same, captured by TransformerEngine or torch
    hooks                    hooks off a subtree and back, and what they do around captures
    capture_session          all ranks or none, and everything as it was
    ledger                   addresses that graphs rely on, and their names
    digest                   of tensors, on the device

How these work is in DESIGN.md beside this package.
"""
