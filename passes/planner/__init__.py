"""What is tried, what is chosen, and the plan that is written: the passes put together.

- `compiler`: the map, `compile_graph`;
- `layouts`: how many stages on how many devices, which logical meshes, how many microbatches;
- `stage_pricing`, `unit_costs`: what layers cost on submeshes of each size;
- `auto_stages`, `stage_choice`, `stage_search`, `stage_sweep`, `stage_problem`: the exact search
  for stages and their submeshes;
- `stage_shardings`: one stage solved and lowered on one logical mesh;
- `candidates`: a step in stages, scheduled and simulated;
- `plan_writer`, `plan_model`: a candidate written as a `Plan`, and a plan followed.
"""
