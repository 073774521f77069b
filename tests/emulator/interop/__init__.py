"""Kernels of others on this emulator: PyPI's flash-attn-4, compiled here, run here, judged here.

Opt-in: it needs an environment of its own (README of the emulator says how to make one), and keeps
nothing of what it compiles.
"""
