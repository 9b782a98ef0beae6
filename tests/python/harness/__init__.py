"""Code that the tests of all rooms share: servers, clients, peers and the files that they read."""
