"""One step of a sampled Gaussian: its moment at every complex order, with quadrature error and decay."""
