"""Data: what clients hold, how it is split between them, and what is spoiled on purpose."""
