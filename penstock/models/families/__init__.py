"""How does each family of models say in `config.json` what it is? One module per line of models."""
