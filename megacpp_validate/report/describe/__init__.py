"""One description a result type: what the result says, as a document."""
