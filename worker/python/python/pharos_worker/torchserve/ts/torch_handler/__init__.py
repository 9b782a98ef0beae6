"""The built-in handlers, which an archive may name instead of a module of the archive."""
