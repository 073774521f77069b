"""All arithmetic in one table: mnemonic to what it computes."""

from __future__ import annotations

from kernels.emulator.ptx import alu, alu_bits, alu_convert, alu_float

OPERATIONS = alu_convert.OPERATIONS | alu_bits.OPERATIONS | alu_float.OPERATIONS
"""Where several know a mnemonic, `alu` comes first: its functions are the fastest."""

assert alu.OPERATIONS.items() <= OPERATIONS.items()
