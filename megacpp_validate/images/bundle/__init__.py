"""Offline bundles: a folder with an image, its wheels, caches and evidence, which restores with no network."""
