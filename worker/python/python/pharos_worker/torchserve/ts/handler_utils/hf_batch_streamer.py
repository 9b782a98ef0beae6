"""A batched text streamer for handlers of Hugging Face models."""

from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer


class TextIteratorStreamerBatch(BaseStreamer):
    """A streamer for `generate` that another thread iterates over: each step is a list of `{"text": ...}`, one for each row of
    the batch. The iteration ends when the first row ends."""

    def __init__(self, tokenizer, batch_size, skip_prompt=False, timeout=None, **decode_kwargs):
        self.batch_size = batch_size
        self.streamers = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs) for _ in range(batch_size)
        ]
        self.streamer_iterators = [iter(streamer) for streamer in self.streamers]

    def put(self, value):
        """Receives the next tokens of all rows: a tensor whose first dimension is the batch."""
        if value.shape[0] != self.batch_size:
            raise ValueError(
                f"TextIteratorStreamerBatch batch size is set to {self.batch_size} but got input tensor of shape {value.shape}"
            )
        for row, streamer in enumerate(self.streamers):
            streamer.put(value[row : row + 1])

    def end(self):
        """Ends the stream."""
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
