"""What is observed in one environment: one probe a bridge module, each in a process of its own, one receipt each."""
