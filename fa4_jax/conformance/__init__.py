"""The same cases, oracle and bound for every implementation: tests and `selftest` use them."""
