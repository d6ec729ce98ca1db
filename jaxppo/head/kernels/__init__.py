"""Other implementations of a tile's arithmetic: a plain one for comparison, and Pallas kernels for TPUs."""
