"""What the guest half does today, as data: checks with their bounds, bits of the native layers, losses of training."""
