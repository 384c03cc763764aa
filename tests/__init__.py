"""A package, so that another distribution's top-level `tests` in site-packages cannot take its name."""
