"""Which optional features watch requests? Hedging, crash quarantine and routing by complexity."""
