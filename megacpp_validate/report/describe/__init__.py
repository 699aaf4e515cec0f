"""What a result says, as a document: one function a result type."""
