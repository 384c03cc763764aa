"""Studio: the runs of a folder as pages in a browser, from their files alone."""
