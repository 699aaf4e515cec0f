"""Report: words and pictures for what a tier observed. Reads typed evidence; decides nothing."""
