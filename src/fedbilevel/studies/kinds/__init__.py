"""Kinds of studies, one module each, whose name is the name in an experiment file."""
