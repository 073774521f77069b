"""The places of the state spaces' windows among generic addresses."""

from __future__ import annotations

PARAMETER_BASE = 0x7F00_0000_0000
"""Generic address of the parameter block."""
LOCAL_WINDOW = 0x7D00_0000_0000
"""Generic address of every thread's local memory."""
SHARED_WINDOW = 0x7E00_0000_0000
"""Generic address of shared memory."""
WINDOWS = {
    "param": PARAMETER_BASE,
    "local": LOCAL_WINDOW,
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "global": 0,
    "const": 0,
}
"""Starts of the windows by the name that cvta gives the state space."""
