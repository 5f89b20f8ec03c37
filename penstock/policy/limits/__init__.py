"""How much may a tenant use, and what does it cost?"""
