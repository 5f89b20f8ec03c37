"""Which adapters does this worker have, and how does a step compute with several of them?"""
