"""Receipts as a site of pages that works from disk: read, judged, described, and written in one move."""
