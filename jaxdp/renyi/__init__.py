"""Moment generating functions and Renyi divergences that need a sum of their own."""
