"""Reads the clips of audio of a request to a language model: files as base64, in the input `audio`."""

import base64
import binascii
import io

import numpy as np

INPUT = "audio"
FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "FLAC": "FLAC", "OGG": "Ogg", "MP3": "MP3"}
"""The names of the formats that are read, by those of libsndfile."""
MOST_SAMPLES = 30_000_000
"""The most samples of a request, over all channels of its clips: 31 minutes at 16 kHz. A small file can have any number of them; each takes
four bytes."""
BLOCK = 65_536
"""The samples of a channel that are read at once: headers can have any number of samples."""


def read(files):
    """Returns the clips of files: the samples (float32, one channel) and their rate in Hz. A clip that cannot be read is an error with its
    number, from 0."""
    try:
        import soundfile
    except ImportError:
        raise ValueError("clips of audio need the package soundfile in the environment of the model") from None
    clips, samples = [], 0
    for number, file in enumerate(files):
        allowed = f"clip {number} is not a file of {', '.join(dict.fromkeys(FORMATS.values()))} in base64"
        blocks = []
        try:
            with soundfile.SoundFile(io.BytesIO(base64.b64decode(file, validate=True))) as clip:
                if clip.format not in FORMATS:
                    raise ValueError(f"{allowed}, but of {clip.format}")
                while len(block := clip.read(BLOCK, dtype="float32", always_2d=True)):
                    samples += block.size
                    if samples > MOST_SAMPLES:
                        raise ValueError(f"the clips have more than {MOST_SAMPLES} samples: clip {number} is too long")
                    blocks.append(block.mean(axis=1))
                rate = clip.samplerate
        except binascii.Error:
            raise ValueError(allowed) from None
        except soundfile.LibsndfileError as error:
            raise ValueError(f"{allowed}: {error.error_string}") from None
        if not blocks:
            raise ValueError(f"clip {number} has no samples")
        clips.append((np.concatenate(blocks), rate))
    return clips

