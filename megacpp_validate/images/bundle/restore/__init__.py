"""What restores a bundle: Python 3.9 and its standard library only, for it runs on hosts that have nothing else.

`script.py` puts these files together as the one `restore.py` that lies in every bundle; the project's own check of a
bundle that it has written runs the same code.
"""
