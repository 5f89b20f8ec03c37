"""What did a simulated run come to? Figures, comparisons and plots."""
