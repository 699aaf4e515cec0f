"""The hybrid smoke model, the language that it learns, and the loop that trains it."""
