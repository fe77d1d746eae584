"""The engine: noise, elementwise work and threads; knows tensors, not models."""
