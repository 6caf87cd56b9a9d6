"""The layer between the rows that clients return and the means that the server uses.

    client:  difference to what was sent -> clip -> error feedback -> compress
    both:    fixed point -> weight
    server:  sum of integers, or a robust mean -> + what was sent

All engines use these functions. Integers do not round, so their sum does not depend on the order of
clients, and all engines agree bit for bit.
"""
