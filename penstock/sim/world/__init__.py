"""What happens to simulated requests? The product's own policies and scheduler on virtual time."""
