"""A result in JUnit XML: one suite a tier, a step or a session."""
