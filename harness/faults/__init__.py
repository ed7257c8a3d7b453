"""Known faults that the harness plants to prove that its checks catch them."""
