"""delta and epsilon split by the range in which the largest loss of a run lies: one contour a range."""
