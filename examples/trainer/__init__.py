"""A GRPO training for pods: many hosts, faults, checkpoints that are checked, a report."""
