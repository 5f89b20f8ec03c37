"""This gateway as a cell among others: what it tells a peer of a request, and what it does with theirs."""
