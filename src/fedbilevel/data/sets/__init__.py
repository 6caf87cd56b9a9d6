"""Built-in data sets, one module each."""
