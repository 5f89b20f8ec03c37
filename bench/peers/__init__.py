"""Our engine beside other people's: model directories, servers, measurements and tables for
`bench/engine/beside_peers.py`.
"""
