"""The verbs of the upgrade canary: a step between releases, all steps, the search for the first bad one, the watch."""
