"""Golden plans: what the compiler decides for the real programs, as text that a change must keep.

`matrix` says which programs are planned with which options, `text` writes a plan as lines,
`files` reads and writes what is stored in this folder, `compute` plans one program, and
`regenerate.py` is the command that compares or replaces the files:

    python tests/golden/regenerate.py --check

The plans use only `autopar.plan` and the fields of `autopar.Plan`, and described clusters: they do
not depend on the compiler's modules or on the machine.
"""
