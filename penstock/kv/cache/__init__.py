"""Which blocks of KV memory does one engine hold, for which requests, and which does it keep for later?"""
