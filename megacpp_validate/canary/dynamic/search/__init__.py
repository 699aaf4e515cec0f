"""The first bad release, and which component it is: a search over one axis or several."""
