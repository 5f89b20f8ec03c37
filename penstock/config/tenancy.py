"""Tenants, tiers, keys and tokens: the sections `tenants`, `tiers` and `auth`."""
