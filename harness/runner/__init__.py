"""What is to run becomes runs on slots, and their records verdicts: `launch`, `plan`, `run`."""
