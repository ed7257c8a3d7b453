"""Graphs of a training step: capture, replay, what they read, and digests of what they wrote.

    graph                        makes graphs; one graph of a whole function
    cuda_graph, host_graph       the two kinds, and recorder: what watches a capture
    graphed_callable             functions of tensors as pairs of graphs, joined to autograd
    library_graphs               the same, captured by TransformerEngine or torch
    hooks                        hooks off a subtree and back, and what they do around captures
    capture_session              all ranks or none, and everything as it was
    ledger                       addresses that graphs rely on, and their names
    digest, digest_triton        128 bits of every tensor

How these work is in DESIGN.md of this package.
"""
