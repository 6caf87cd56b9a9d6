"""Real federations: what passes between a server without data and sites that keep theirs, whatever carries the messages."""
