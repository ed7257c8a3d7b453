"""Programs under test: whose training a run observes, and what they need."""
