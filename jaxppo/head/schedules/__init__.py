"""Loops over tiles, compaction of counted tokens, custom gradients and every collective."""
