"""The studio: runs in a browser, with a form to configure them and buttons to start and stop them."""
