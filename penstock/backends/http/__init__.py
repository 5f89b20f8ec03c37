"""How does a gateway talk to an engine or a provider that is not ours? Streams over HTTP."""
