"""The system as the outside can see it: metrics and logs."""
