"""Other systems and this one. Each module is imported only when it is asked for."""
