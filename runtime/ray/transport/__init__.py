"""How bytes and programs get from process to process: routes, tiles, sockets, pickles, groups."""
