"""Reads the images of a request to a language model: files as base64, as Triton's vllm_backend has them in the input `image`."""

import base64
import binascii
import io

INPUT = "image"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are read. Others of Pillow start programs, or read other files."""
MOST_PIXELS = 100_000_000
"""The most pixels of a request, over all of its images. A small file can have any number of them; each takes three bytes."""


def read(files):
    """Returns the images of files, in RGB. An image that cannot be read is an error with its number, from 0."""
    from PIL import Image

    images, pixels = [], 0
    for number, file in enumerate(files):
        try:
            image = Image.open(io.BytesIO(base64.b64decode(file, validate=True)), formats=FORMATS)
        except (binascii.Error, OSError, Image.DecompressionBombError):
            raise ValueError(f"image {number} is not a file of {', '.join(FORMATS)} in base64") from None
        pixels += image.width * image.height
        if pixels > MOST_PIXELS:
            raise ValueError(f"the images have more than {MOST_PIXELS} pixels: image {number} has {image.width} x {image.height}")
        try:
            images.append(image.convert("RGB"))
        # Damaged files raise errors of many types.
        except Exception as error:
            raise ValueError(f"image {number} cannot be read: {error}") from None
    return images
