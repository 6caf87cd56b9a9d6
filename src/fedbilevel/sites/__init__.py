"""Real federations: a server without data, and sites that keep theirs. They exchange messages over
any transport."""
