"""A model that speaks, trained: SmolLM2-135M-Instruct, and a task for it."""
