"""The first day on a new GPU: one command that says what holds, what falls and what to change."""
