"""Blackwell kernels (sm_100f: B200, GB200, B300)."""
