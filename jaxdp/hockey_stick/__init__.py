"""Certified hockey-stick divergences delta(eps) = H_{e^eps}(P, Q) and their inverses, one point per kernel."""
