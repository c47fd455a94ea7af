"""What ``kvops bench`` measures: one benchmark a file."""
