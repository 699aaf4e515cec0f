"""The suite's own score: faults planted in wrappers and in what Transformer Engine returns, and who is blamed."""
