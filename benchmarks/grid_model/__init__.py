"""Estimates cycles of the project's kernels, for comparison with measured ones."""
