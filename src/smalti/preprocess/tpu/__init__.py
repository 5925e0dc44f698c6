"""Pallas TPU kernels: `forward` and `backward` of the whole step, and the `tiles` they share."""
