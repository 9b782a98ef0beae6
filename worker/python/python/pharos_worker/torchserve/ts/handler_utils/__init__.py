"""What handlers of large models and of micro-batches use."""
