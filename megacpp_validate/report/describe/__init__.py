"""What each result says: one `describe_<result>(result) -> Document` a result type."""
