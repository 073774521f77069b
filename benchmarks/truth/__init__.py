"""Estimated against measured cycles of the project's kernels."""
