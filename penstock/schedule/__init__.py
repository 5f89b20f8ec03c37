"""What the engine computes next. Pure: the real engine and the simulator run the same objects."""
