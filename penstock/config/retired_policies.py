"""Retired keys of tenants, admission, queues, routing, limits, health and prices (see retired.py)."""

RETIRED_POLICIES: dict[str, str] = {}
