"""From a user's function and its arguments to a `Graph` (`trace` does it).

- `signature`, `arguments`: how it is called, and the leaves of that;
- `returned`, `roles`: which leaves are state, batch, or neither.
"""
