"""What all TPU kernels share."""
