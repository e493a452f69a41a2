"""Pipeline programs: one list of instructions per mesh, and a virtual clock that runs it.

In the order in which they are met:

- `instructions`: `Run`, `Send`, `Recv`, `Reshard`, `Accumulate`, `Free`, and the program of them;
- `validate`: what pieces and transfers must be like;
- `emit`: from a schedule and pieces to a program (`autopar.passes.pipeline.emit.emit`);
- `order`: one order in which all meshes' instructions can be dispatched, or why there is none;
- `verify`: the checker of programs (`autopar.passes.pipeline.verify.verify`);
- `buffer_memory`: live bytes at every instruction;
- `simulate`: the virtual clock (`autopar.passes.pipeline.simulate.simulate`);
- `parts`: what a program is made of but the order, and values that are used alike as one;
- `forecast`: what a step takes and holds, for many microbatches without their instructions;
- `what_if`: another schedule, other links or more devices for a plan that was saved;
- `timeline`: when everything happened, simulated or measured, and its pictures.
"""
