"""The verbs of the suite's own scores: planted faults, and what was made of them."""
