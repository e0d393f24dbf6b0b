"""Moving pages between device and host."""
