"""Plans held against the real compilers: what they allocate and which collectives they keep."""
