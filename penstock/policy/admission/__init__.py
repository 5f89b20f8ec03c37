"""May a request come in, and what is it promised?"""
