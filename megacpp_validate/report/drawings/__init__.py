"""What is drawn: SVG with the ink of the page only."""
