"""The product on virtual time: the real policies, scheduler and block pool, with modelled steps, network and
failures.
"""
