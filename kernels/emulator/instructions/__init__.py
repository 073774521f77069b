"""Instructions with an effect beyond their own registers, in files named by mnemonic."""
