"""How the two demo models are made: data, tokenizer, training, export and evaluation.

Start with `make_demo`, which runs every step. Nothing here is needed to serve a model.
"""
