"""What the command line decides, kept as data and compared: `python -m tests.replay record | compare`."""
