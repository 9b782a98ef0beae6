"""A model that attacks as its client says: the kind of the attack and its target."""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

libc = ctypes.CDLL(None, use_errno=True)
published = []


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


def enter(group):
    """Enters a control group, as a model can that leaves its limits."""
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write("0")


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


def limit_files(target):
    resource.prlimit(int(target), resource.RLIMIT_NOFILE, (64, 64))


def datagram(target):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.sendto(b"x", target)


def system_v_memory(_target):
    identifier = libc.shmget(0x7068, 4096, 0o1600)
    checked(identifier)
    libc.shmctl(identifier, 0, None)


def change_mode(target):
    before = os.stat(target).st_mode
    os.chmod(target, 0o777)
    if os.stat(target).st_mode == before:
        raise PermissionError


def type_into_terminal(_target):
    with open("/dev/tty", "w"):
        pass


def unix_socket(_target):
    with socket.socket(socket.AF_UNIX):
        pass


def copy_file(_target):
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/a", "w") as file:
            file.write("x")
        shutil.copy2(f"{folder}/a", f"{folder}/b")


def deep_directories(_target):
    os.chdir(tempfile.gettempdir())
    for _ in range(2_000):
        os.mkdir("d")
        os.chdir("d")


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


def name_a_thread(_target):
    """Names another thread, as CUDA does and fails if it cannot; also after the kernel has emptied its cache of directories."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with open(f"/proc/self/task/{thread.native_id}/comm", "w") as file:
            file.write("named")
    finally:
        end.set()
        thread.join()


def forge_report(target):
    """Takes the connection of the fork server that has started this process, and reports a process as its copy."""
    pidfd_getfd, sent = 438, False
    server, process = os.pidfd_open(os.getppid()), os.pidfd_open(int(target))
    for number in os.listdir(f"/proc/{os.getppid()}/fd"):
        descriptor = libc.syscall(pidfd_getfd, server, int(number), 0)
        checked(descriptor)
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            continue
        if connection.type == socket.SOCK_SEQPACKET:
            socket.send_fds(connection, [json.dumps({"forked": int(target)}).encode()], [process])
            sent = True
        connection.close()
    assert sent


def pass_descriptor(target):
    """Sends a file to the server, which would have to close it. `target` is the descriptor of a connection to it."""
    with open(os.devnull) as file, socket.socket(fileno=os.dup(int(target))) as connection:
        socket.send_fds(connection, [b"x"], [file.fileno()])


def publish(target):
    """Publishes a metric whose name is plain, and whose help and labels are the target."""
    family = pb_utils.MetricFamily(name="published", description=target, kind=pb_utils.MetricFamily.COUNTER)
    family.Metric(labels={"model": target, "tenant": target}).increment(1)
    published.append(family)
    print(target, flush=True)


ATTACKS = {
    "read": read,
    "list": listed,
    "link": os.readlink,
    "write": write,
    "enter control group": enter,
    "forge report": forge_report,
    "pass descriptor": pass_descriptor,
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
    "name a thread": name_a_thread,
    "socket pair": lambda target: [one.close() for one in socket.socketpair()],
    "numpy": lambda target: np.linalg.inv(np.eye(64)),
    "orphan": orphan,
    "limit files": limit_files,
    "priority of the user": lambda target: os.setpriority(os.PRIO_USER, 0, os.getpriority(os.PRIO_PROCESS, 0)),
    "datagram": datagram,
    "system v memory": system_v_memory,
    "change mode": change_mode,
    "watch": lambda target: checked(libc.inotify_add_watch(libc.inotify_init(), target.encode(), 0xFFF)),
    "type into terminal": type_into_terminal,
    "unix socket": unix_socket,
    "copy file": copy_file,
    "deep directories": deep_directories,
    "publish": publish,
}


def outcome(call):
    """Returns `done`, or the text of the server's refusal."""
    try:
        call()
    except pb_utils.TritonModelException as error:
        return str(error)
    return "done"


def load(target):
    """Loads a model: the target is JSON with the name, and optionally the configuration and files."""
    asked = json.loads(target)
    files = {f"file:{path}": content.encode() for path, content in asked.pop("files", {}).items()}
    if files:
        asked["files"] = files
    return outcome(lambda: pb_utils.load_model(**asked))


ANSWERS = {
    "load": load,
    "unload": lambda target: outcome(lambda: pb_utils.unload_model(target)),
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
                if kind in ANSWERS:
                    result = ANSWERS[kind](target)
                if kind in ATTACKS:
                    ATTACKS[kind](target)
            except OSError as error:
                result = type(error).__name__
            output = pb_utils.Tensor("RESULT", np.array([result], dtype=object))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
