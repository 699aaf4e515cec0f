"""The smoke run: the hybrid model trained for real on one rank or several, and what each of them saw."""
