"""The memory of processes."""

import logging
import os


def get_cpu_usage(pid):
    """The bytes that a process has in memory; 0 if there is none of this id."""
    try:
        with open(f"/proc/{int(pid)}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        logging.error("Failed get process for pid: %s", pid, exc_info=True)
        return 0


def check_process_mem_usage(stdin):
    """Logs `PID:BYTES` for each process of a line of ids, which are separated by commas."""
    for process in stdin.readline().strip().split(","):
        if process:
            logging.info("%s:%d", process, get_cpu_usage(process))
