"""Adapters for other systems. Each module is imported only when a program imports it."""
