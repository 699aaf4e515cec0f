"""The gate: rules in, verdict out. Pure values; it starts nothing and measures nothing."""
