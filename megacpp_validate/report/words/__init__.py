"""What is said of a result: the sentences that every form shares."""
