"""How fast is a model on which accelerator, and how many does a traffic need? Pure, without a world."""
