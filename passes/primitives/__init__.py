"""What one equation is to the passes: its factor rule, its operations, its evaluation on slices.

- `factor_rule`, `populate`, `shardy`, `own_rules`, `shardings`: which dimensions are the same loop;
- `linearity`: how partial sums pass through; `flops`: what it costs;
- `localize`, `products`: what a microbatch or a device computes of it.

Which primitives there are, and what they are, says `autopar.passes.graph.primitives`.
"""
