"""What cells leave: the checks that the gate requires, and what the bridge passes to Transformer Engine."""
