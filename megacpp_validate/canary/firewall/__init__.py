"""Damaged installs, laid out and judged."""
