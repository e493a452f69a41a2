"""The compiler: pure functions from values to values; no accelerator is touched.

`planner.compiler` composes them on one page. The rooms, from the ground up:

- `graph`: the values: a flat program with labelled leaves, a step in phases, the primitives;
- `primitives`: which dimensions of an equation are the same loop, and its evaluation on slices;
- `trace`: a user's step becomes a `Graph`;
- `microbatch`: an exact split of the batch into a loop, with a certificate for every output;
- `sharding`: a strategy for every equation on a logical mesh, and the program that it lowers to;
- `solver`: the integer linear program that chooses, a plain problem that knows nothing of JAX;
- `slicing`: the microbatched step cut into pipeline stages, each again a step in phases;
- `schedules`: in which order the meshes run the stages' tasks, and the checker of such orders;
- `pipeline`: one list of instructions per mesh, verified, and simulated with a virtual clock;
- `pieces`: the functions that the instructions run;
- `planner`: what is tried, chosen, and written down as a plan.
"""
