"""Losses: from a head's statistics, or from hidden states, to a scalar, its gradient and metrics."""
