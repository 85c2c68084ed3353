"""delta and epsilon split by the range (band) in which the largest loss of a run lies: one contour for each band."""
