"""Evidence: what a tier observed, as typed values with a published schema. Data only; the words are in `report`."""
