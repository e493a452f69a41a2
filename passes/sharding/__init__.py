"""The intra-operator pass: a strategy for every equation, found by an integer linear program."""
