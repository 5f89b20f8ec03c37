"""How many workers should each model have, of which pool, and why?"""
