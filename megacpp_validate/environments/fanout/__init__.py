"""Many cells as many jobs: one job a cell, on this machine or through a scheduler that is there already."""
