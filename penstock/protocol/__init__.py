"""Wire formats, as structs and sans-I/O codecs: OpenAI's JSON, server-sent events, and the worker's
frames.
"""
