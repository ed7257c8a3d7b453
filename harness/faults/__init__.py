"""Known faults that the harness plants to prove that its checks catch them.

    catalogue.txt  what each fault is, where it shows, what must catch it; read by fault, catalogue
    cases          from an entry to the cases that it is looked for in; cases without a fault
    campaign       runs the cases, a row for each fault, rates with their bounds, tables
    scoring        how well a place was found

What a fault does in a rank is in `harness.worker.plants`, which needs torch.
"""
