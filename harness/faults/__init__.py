"""Known faults that the harness plants to prove that its checks catch them.

catalogue.txt says what each is, where it shows, what must catch it, and what a rank does for it, in
the words of `harness.worker.plant`; `harness.campaign` runs them and scores the answers.
"""
