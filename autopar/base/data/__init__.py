"""Numbers that stand for hardware, with the document that each comes from."""
