"""Which accesses are ordered: happens-before of shared, global and tensor memory."""
