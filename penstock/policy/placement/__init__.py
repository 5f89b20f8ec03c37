"""Which worker gets a request?"""
