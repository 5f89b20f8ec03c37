"""Where workers come from: each source says which workers there should be (see fleet/members.py)."""
