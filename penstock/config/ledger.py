"""Prices, budgets and the usage ledger: the sections `prices` and `ledger`."""
