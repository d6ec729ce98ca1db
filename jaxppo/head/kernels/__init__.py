"""Other implementations of a tile's arithmetic: one written out for comparison, and kernels for one kind of chip."""
