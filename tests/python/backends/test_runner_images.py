"""The images of requests to the backend `vllm`: files in base64 become images in RGB; wrong and too large ones are refused."""

import base64
import importlib.util
import io
import struct
import zlib

import pytest

from harness.server import ROOT

Image = pytest.importorskip("PIL.Image", reason="Pillow is missing: `pip install pillow`")

spec = importlib.util.spec_from_file_location("runner_images", ROOT / "worker/python/python/pharos_worker/runners/images.py")
images = importlib.util.module_from_spec(spec)
spec.loader.exec_module(images)


def encoded(kind="PNG", mode="RGB", size=(3, 2)) -> bytes:
    """Returns a file of an image as base64."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return base64.b64encode(file.getvalue())


def png_of(width: int, height: int) -> bytes:
    """Returns a PNG without data that says to have a size."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def test_images_are_rgb_in_their_order():
    """Whatever the file has."""
    found = images.read([encoded(), encoded("JPEG", "L", (5, 5)), encoded("GIF", "P", (1, 4)), encoded("PNG", "RGBA")])
    assert [(image.mode, image.size) for image in found] == [("RGB", (3, 2)), ("RGB", (5, 5)), ("RGB", (1, 4)), ("RGB", (3, 2))]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([encoded(), b"x"], "image 1 is not a file of PNG, JPEG, WEBP, GIF, BMP in base64"),
        ([base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")], "image 0 is not a file of"),
        ([encoded()[:60] + encoded()[:4]], "image 0"),
        ([png_of(10_000, 10_001)], "the images have more than 100000000 pixels: image 0 has 10000 x 10001"),
        ([png_of(2**31 - 1, 2**31 - 1)], "image 0"),
        ([encoded(size=(6000, 9000))] * 2, "image 1 has 6000 x 9000"),
    ],
)  # fmt: skip
def test_wrong_images_are_refused(files, why):
    """By their number, before their pixels are computed."""
    with pytest.raises(ValueError) as raised:
        images.read(files)
    assert why in str(raised.value)
