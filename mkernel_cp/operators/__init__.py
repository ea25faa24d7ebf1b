"""The operators: one module each."""
