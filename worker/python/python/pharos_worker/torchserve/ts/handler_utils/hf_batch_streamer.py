"""Texts of a batch while they are generated, for handlers of Hugging Face's models."""

from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer


class TextIteratorStreamerBatch(BaseStreamer):
    """Passed to `generate` as its streamer, and iterated over on another thread: each step is a list of `{"text": ...}`, one
    for each row of the batch. It ends with the first row that ends."""

    def __init__(self, tokenizer, batch_size, skip_prompt=False, timeout=None, **decode_kwargs):
        self.batch_size = batch_size
        self.streamers = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs) for _ in range(batch_size)
        ]
        self.streamer_iterators = [iter(streamer) for streamer in self.streamers]

    def put(self, value):
        """Takes the next tokens of every row: a tensor whose first dimension is the batch."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"TextIteratorStreamerBatch batch size is set to {self.batch_size} but got input tensor of shape {value.shape}"
            )
        for row, streamer in enumerate(self.streamers):
            streamer.put(value[row : row + 1])

    def end(self):
        """There are no more tokens."""
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self):
        return self

    def __next__(self):
        ended = object()
        texts = [next(iterator, ended) for iterator in self.streamer_iterators]
        if any(text is ended for text in texts):
            raise StopIteration
        return [{"text": text} for text in texts]
