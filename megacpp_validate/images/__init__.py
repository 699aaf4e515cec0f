"""Golden images: from rows of the matrix and pins to what is built, and what is known of it."""
