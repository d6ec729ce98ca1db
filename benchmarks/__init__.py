"""The head of a language model, every way to compute it, side by side."""
