"""What a plan says of this machine, and what is measured on it."""
