"""Which waiting request is next, and is there a worker with capacity for it?"""
