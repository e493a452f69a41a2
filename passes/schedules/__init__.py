"""Pipeline schedules as values: which mesh runs which task in which order.

- `schedule`: `Task` and `Schedule`;
- `named`: the orders that have names in the literature;
- `repeats`: rounds that are alike, of which a shorter schedule has fewer;
- `make`: `make_schedule`, which takes a name or a user's function;
- `checker`: the one checker that proves any of them complete and free of deadlocks;
- `flight`: how many microbatches a stage has in flight.
"""
