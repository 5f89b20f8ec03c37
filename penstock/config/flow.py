"""Queues, admission, limits' sharing and degradation: the sections `queue`, `admission`, `routing` and `shared`."""
