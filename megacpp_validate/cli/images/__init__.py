"""The verbs of golden environments: pins and locks, images, bundles, their verification."""
