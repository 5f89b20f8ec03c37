"""The life of a request, decided from facts and a clock. The rooms' shared words are modules here.

Pure: no I/O, no clock.
"""
