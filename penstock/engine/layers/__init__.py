"""The decoder's building blocks: objects with weights inside, each row computed by itself."""
