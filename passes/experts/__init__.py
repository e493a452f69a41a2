"""Expert parallelism of grouped products, written into the program."""
