"""The state that several gateways share: where the leases of policy/limits/lease.py come from, and who
carries the questions there.
"""
