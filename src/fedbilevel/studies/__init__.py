"""Kinds of studies that an experiment file can name: one module each, with a function `run`."""
