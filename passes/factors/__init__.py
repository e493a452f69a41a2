"""Factor rules: which loops an equation runs, and which of them can be cut."""
