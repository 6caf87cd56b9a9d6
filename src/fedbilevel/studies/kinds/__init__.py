"""Kinds of studies, one module each with a function `run`. An experiment file names the module."""
