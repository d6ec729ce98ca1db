"""Arithmetic of one tile: no mesh and no collective in it."""
