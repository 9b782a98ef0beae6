"""Parts of the tests of TorchServe's handlers that tests of other handlers import."""
