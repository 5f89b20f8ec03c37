"""Our engine beside other people's: model directories, servers, measurements and tables for
`engine_bench.py`.
"""
