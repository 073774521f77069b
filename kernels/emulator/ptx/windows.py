"""Where the windows of the state spaces lie among generic addresses."""

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
"""By the name of the state space in cvta."""
