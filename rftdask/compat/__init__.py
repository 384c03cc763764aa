"""Code written for other systems, which runs here as it is."""
