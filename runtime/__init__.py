"""What executes a plan: in one process, on all of its devices."""
