"""Which tokens may an answer have that must match a schema, a regular expression or a grammar?

source     what a request asks for -> a grammar of llguidance, or the words of a refusal
compiler   grammar -> compiled, on threads, cached
answer     one answer: where it stands in its grammar, and which tokens follow without a choice
rows       the answers of a batch: masks for the sampler, computed while the model computes
"""
