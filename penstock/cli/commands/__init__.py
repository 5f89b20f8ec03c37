"""What can an operator type? One module per command, and the helpers that only commands use."""
