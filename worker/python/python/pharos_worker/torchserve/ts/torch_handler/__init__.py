"""The handlers that an archive may name in place of one of its own."""
