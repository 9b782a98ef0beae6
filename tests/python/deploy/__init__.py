"""The files of `deploy/`: their documents against schemas, and the command lines in them against the real server."""
