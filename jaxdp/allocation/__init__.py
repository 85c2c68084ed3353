"""Random allocation (balls and bins) with Gaussian noise: certified delta and epsilon of one epoch.

Proofs: notebooks/proofs/allocation.md. Record and verbs: `jaxdp.RandomAllocation`.
"""
