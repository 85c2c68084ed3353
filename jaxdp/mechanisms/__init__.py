"""Records of mechanisms and their log moment generating functions."""
