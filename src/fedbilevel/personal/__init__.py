"""`fb.personalise`: a classifier of every client's own, without losses or step sizes to write."""
