"""Runs the kernels' PTX on a CPU, under adversarial timing."""

from kernels.emulator.errors import EmulationError, PtxError
from kernels.emulator.launch import launch
from kernels.emulator.names import Names
from kernels.emulator.policy import Policy
from kernels.emulator.report import Report

__all__ = ["EmulationError", "Names", "Policy", "PtxError", "Report", "launch"]
