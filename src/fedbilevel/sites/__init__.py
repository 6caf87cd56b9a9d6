"""Real federations: a server without data and sites with private data exchange messages over any
transport."""
