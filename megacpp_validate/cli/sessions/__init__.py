"""The verbs that run cells on a stack: parity, FP8, smoke, ablation, a matrix of stacks, the doctor."""
