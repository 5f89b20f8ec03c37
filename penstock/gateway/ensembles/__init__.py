"""Steps of an operator's own before and after a model, in processes of their own."""
