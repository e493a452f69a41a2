"""Dimensions that the devices do not divide, made larger: an exact rewrite of the program."""
