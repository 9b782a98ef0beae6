"""Envelopes: what stands between the forms of other servers and a handler's list of items."""
