"""Memory usage of processes."""

import logging
import os


def get_cpu_usage(pid):
    """Returns the resident memory of a process in bytes; 0 if the process does not exist."""
    try:
        with open(f"/proc/{int(pid)}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        logging.error("Failed get process for pid: %s", pid, exc_info=True)
        return 0


def check_process_mem_usage(stdin):
    """Logs `PID:BYTES` for each process in a line of comma-separated ids."""
    for process in stdin.readline().strip().split(","):
        if process:
            logging.info("%s:%d", process, get_cpu_usage(process))
