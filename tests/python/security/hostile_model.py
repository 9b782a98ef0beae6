"""A model that attacks as its client says: the kind of the attack and its target."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

libc = ctypes.CDLL(None, use_errno=True)


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")


def read(target):
    if os.path.isdir(target):
        return listed(target)
    with open(target, "rb") as file:
        if target.endswith("/mem"):
            return
        file.read(1)


def listed(target):
    os.listdir(target)


def write(target):
    with open(target, "ab"):
        pass


def truncate(target):
    os.truncate(target, 0)


def connect(target):
    with socket.create_connection(("127.0.0.1", int(target)), timeout=10):
        pass


def abstract_socket(_target):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("\0pharos-test-" + str(os.getpid()))


def read_memory(target):
    buffer = ctypes.create_string_buffer(8)

    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    here, there = Vector(ctypes.addressof(buffer), 8), Vector(0, 8)
    checked(libc.process_vm_readv(int(target), ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def orphan(_target):
    code = "import time; time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.DEVNULL)


def temporary_file(_target):
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")


def child_process(_target):
    code = "try: open('/etc/shadow')\nexcept PermissionError: print('refused')"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "refused\n", output


def threads(_target):
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


ATTACKS = {
    "read": read,
    "list": listed,
    "link": os.readlink,
    "write": write,
    "truncate": truncate,
    "kill": lambda target: os.kill(int(target), signal.SIGKILL),
    "ptrace": lambda target: checked(libc.ptrace(16, int(target), 0, 0)),
    "read memory": read_memory,
    "unshare": lambda target: checked(libc.unshare(0x10000000)),
    "io_uring": lambda target: checked(libc.syscall(425, 1, 0)),
    "connect": connect,
    "abstract socket": abstract_socket,
    "temporary file": temporary_file,
    "child process": child_process,
    "threads": threads,
    "socket pair": lambda target: [one.close() for one in socket.socketpair()],
    "numpy": lambda target: np.linalg.inv(np.eye(64)),
    "orphan": orphan,
}
FACTS = {
    "environment": lambda: json.dumps(dict(os.environ)),
    "descriptors": lambda: json.dumps(os.listdir("/proc/self/fd")),
    "new privileges": lambda: open("/proc/self/status").read().split("NoNewPrivs:\t")[1][0],
    "temporary directory": tempfile.gettempdir,
}


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            kind, target = (text.decode() for text in pb_utils.get_input_tensor_by_name(request, "ATTACK").as_numpy())
            try:
                result = FACTS[kind]() if kind in FACTS else "done"
                if kind in ATTACKS:
                    ATTACKS[kind](target)
            except OSError as error:
                result = type(error).__name__
            output = pb_utils.Tensor("RESULT", np.array([result], dtype=object))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
