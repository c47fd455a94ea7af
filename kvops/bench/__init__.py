"""What ``kvops bench`` measures: one benchmark a file, each with a pool of its own that ends with it."""
