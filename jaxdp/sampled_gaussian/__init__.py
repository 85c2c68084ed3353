"""One step of a sampled Gaussian: its moment m(z) at every complex order z, with error bounds, and its decay."""
