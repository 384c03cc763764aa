"""Commands that read, export or rewrite what runs leave on storage, and the datasets made of it."""
