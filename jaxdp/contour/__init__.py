"""Certified delta and epsilon from K(z) = log E e^{zL}: plan, trapezoid sum, truncation, lattice, derivative."""
