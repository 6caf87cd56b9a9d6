"""One file per algorithm; the file's name is the name on the command line. Found by discovery, listed nowhere."""
