"""Which models are served, and how does a request become tokens for one of them?"""
