"""The first day on a new GPU: one command says what holds, what falls and what to change."""
