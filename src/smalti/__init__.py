"""Attention for JAX that knows what a mask leaves out."""
