"""Model families: what a Hugging Face checkpoint means, as a spec for the one decoder."""
