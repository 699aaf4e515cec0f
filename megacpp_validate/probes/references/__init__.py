"""What each probe holds its tensors to: the formulas written out in fp64, independent of every path that is judged."""
