"""Is a new version as good as the old one? The version that each conversation gets meanwhile, and the time of
the decision.
"""
