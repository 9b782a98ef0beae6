"""Leaves files with buffered text, a running thread, a function of `atexit` and text of C's library when its process ends."""

import atexit
import ctypes
import os
import threading
import time
import weakref

import numpy
import triton_python_backend_utils as utils

HERE = os.path.dirname(__file__)
TEXT = open(os.path.join(HERE, "text"), "w")
BYTES = open(os.path.join(HERE, "bytes"), "wb")
CLOSED = open(os.path.join(HERE, "closed"), "w")
CLOSED.close()


class Proxy:
    """An object whose class cannot be asked for."""

    @property
    def __class__(self):
        raise RuntimeError("there is no object")


PROXY = Proxy()


class TritonPythonModel:
    def initialize(self, arguments):
        TEXT.write("text")
        BYTES.write(b"bytes")
        self.own = open(os.path.join(HERE, "own"), "w")
        self.own.write("own")
        self.watched = numpy.zeros(1)
        weakref.finalize(self.watched, print, "the object is finalized")
        atexit.register(print, "atexit is called")
        ctypes.CDLL(None).printf(b"C has printed\n")
        threading.Thread(target=self.work).start()

    def work(self):
        main = threading.main_thread()
        while main.is_alive():
            time.sleep(0.01)
        print("the thread has ended")

    def execute(self, requests):
        return [utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        print("the model is finalized")
