"""A trace replayed against the resources of an SM."""
