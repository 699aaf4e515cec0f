"""What is timed of each bridge module: one file a module, none of which imports another.

`speed(stopwatch)` adds uses at sizes of production, which keep a GPU busy for longer than the host needs to launch
them; on the CPU they are small. A name says what is timed and stays: rows of two receipts are joined by it.
"""
