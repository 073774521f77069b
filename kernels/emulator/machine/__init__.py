"""What is resident and what is in flight: CTAs, warps, barriers, copies, products."""
