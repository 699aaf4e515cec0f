"""A result in words: one `describe_<result>(result) -> Document` a result type."""
