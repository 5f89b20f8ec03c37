"""What the outside can see: metrics and logs."""
