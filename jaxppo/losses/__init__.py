"""Losses of a head's statistics or of hidden states: each returns a scalar and its metrics."""
