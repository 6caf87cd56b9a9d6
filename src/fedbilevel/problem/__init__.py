"""Problems: two losses, their variables, and the clients' data."""
