"""Decisions about requests before a worker is chosen: pure code that gateway and simulator both drive."""
