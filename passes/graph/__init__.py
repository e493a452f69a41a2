"""The compiler's values: flat programs with labelled leaves, and steps in phases."""
