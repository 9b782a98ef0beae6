"""The clips of audio of requests to the backend `vllm`: files in base64 become samples of one channel; wrong and too long ones are refused."""

import base64
import importlib.util
import io

import numpy as np
import pytest

from harness.server import ROOT

soundfile = pytest.importorskip("soundfile", reason="soundfile is missing: `pip install soundfile`")

spec = importlib.util.spec_from_file_location("runner_audio", ROOT / "worker/python/python/pharos_worker/runners/audio.py")
audio = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audio)


def encoded(kind="WAV", samples=1600, channels=1, value=0.0) -> bytes:
    """Returns a file of a clip as base64."""
    file = io.BytesIO()
    soundfile.write(file, np.full((samples, channels), value, np.float32), 16_000, format=kind)
    return base64.b64encode(file.getvalue())


def changed(file: bytes, at: int, new: bytes) -> bytes:
    """Returns a file with other bytes from a position on."""
    content = bytearray(base64.b64decode(file))
    content[at : at + len(new)] = new
    return base64.b64encode(content)


def test_clips_have_one_channel_in_their_order():
    """Whatever the file has."""
    found = audio.read([encoded(), encoded("FLAC", 100_000, 2, 0.5), encoded("OGG"), encoded("MP3")])
    assert [(samples.dtype, samples.ndim, rate) for samples, rate in found] == [(np.float32, 1, 16_000)] * 4
    assert [len(samples) for samples, _ in found[:3]] == [1600, 100_000, 1600]
    assert np.allclose(found[1][0], 0.5, atol=1e-3)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([encoded(), b"x"], "clip 1 is not a file of WAV, FLAC, Ogg, MP3 in base64"),
        ([base64.b64encode(b"hi")], "clip 0 is not a file of WAV, FLAC, Ogg, MP3 in base64: "),
        ([encoded("AIFF")], "clip 0 is not a file of WAV, FLAC, Ogg, MP3 in base64, but of AIFF"),
        # A header that says to have 2^36 - 1 samples: they are not allocated.
        ([changed(encoded("FLAC"), 21, b"\xff\xff\xff\xff\xff")], "clip 0 is not a file of WAV, FLAC, Ogg, MP3 in base64: "),
        ([encoded(samples=0)], "clip 0 has no samples"),
        ([encoded("FLAC", 8_000_000, 2)] * 2, "the clips have more than 30000000 samples: clip 1 is too long"),
    ],
)  # fmt: skip
def test_wrong_clips_are_refused(files, why):
    """By their number."""
    with pytest.raises(ValueError) as raised:
        audio.read(files)
    assert why in str(raised.value)
