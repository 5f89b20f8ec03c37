"""The engine's next computation. Pure: the real engine and the simulator run the same objects."""
