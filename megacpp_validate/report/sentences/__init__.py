"""What each kind of change means, in sentences; one module a family of kinds. `report.words` is the door."""
