"""Adapters for libraries that have an attention of their own; docs/integrations.md shows each.

A module here imports the library that it is named after, and nothing else in fa4_jax imports it.
"""
