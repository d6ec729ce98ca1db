"""Plans the mesh of a model for a pod, by compiling its training step for described devices."""
