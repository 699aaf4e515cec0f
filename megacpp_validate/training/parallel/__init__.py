"""Training on several ranks: the plan, the processes, the exchange of tokens, checkpoints, and what time went into."""
