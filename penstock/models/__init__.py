"""What is a model? Its `config.json` read into a `DecoderSpec`.

Pure: engine, planner and simulator use it.
"""
