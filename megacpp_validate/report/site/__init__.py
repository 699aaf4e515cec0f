"""Receipts and results as a site of pages: written aside, and put in its place in one move."""
