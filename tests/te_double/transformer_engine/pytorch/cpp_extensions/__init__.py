"""Where Transformer Engine takes its products from."""
