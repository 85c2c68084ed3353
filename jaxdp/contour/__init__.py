"""From K(z) = log E e^{zL} to certified delta and epsilon: plan, trapezoid sum, truncation, lattice, derivative."""
