"""Attention on a mesh: batch and heads are shared out, lengths and head_dim never are.

Each device attends with its own batch entries and its own heads, so the forward needs no
communication. Who shares out depends on the type of the mesh axes:

- Auto: the compiler, by a rule (`auto`).
- Explicit: this library, by the operands' types (`explicit`).
- Manual (inside the caller's own shard_map): nobody. A call is the attention of one device.
"""
