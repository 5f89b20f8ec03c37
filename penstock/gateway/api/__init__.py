"""Which endpoints are there, and what does each answer?"""
