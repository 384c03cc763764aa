"""Commands for a start: a first configuration, bundled examples, a toy model, files of other systems."""
