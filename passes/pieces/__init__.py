"""From lowered stages to the pieces that a schedule's tasks run (`cutting` puts it together).

- `opened`: a stage's program at its loop, and what its links change there;
- `rounds`, `residuals`: which piece an instruction belongs to, and what B repeats;
- `numbering`, `stage_pieces`, `pieces`: the values that pieces pass on, and the pieces;
- `piece_costs`: what they are expected to take.
"""
