"""Is a worker healthy, and how often may a request be retried?"""
