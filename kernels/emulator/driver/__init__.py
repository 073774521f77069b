"""What stands in for libcuda; importing it attaches the functions where that library runs."""

from kernels.emulator.driver.driver import SETTINGS_VARIABLE, Driver, settings

__all__ = ["SETTINGS_VARIABLE", "Driver", "settings"]
